"""The stage graph: which keys redo which stage, and how it reads a run's record."""

from pathlib import Path
from typing import Any

import pytest

from shards.errors import ConfigError, DataError
from tests.support import RECIPES
from trainer.config.schema import ExecutionConfig, Recipe
from trainer.methods.registry import method_names
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.run.ledger import StageLedger
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import default_keys, hash_keys, result_keys
from trainer.run.stage_graph import all_stages, find_stage, require_stages, stage_keys, stages_of

FACTS = {"data.train.checksum": "aaaa", "data.eval.test.checksum": "bbbb"}
METHODS = ("standard", "coteaching", "coteaching_incv")
STAGES = ("pack", "labels", "incv", *METHODS, "evaluate", "export", "report")
"""Those of recipes/tiny.yaml."""
FOLLOWERS = {"evaluate", "export", "report"}  # of every method


def tiny(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "tiny.yaml", overrides)


def hashes(recipe: Recipe, facts: dict[str, Any] = FACTS) -> dict[str, str]:
    return {stage: hash_keys(keys) for stage, keys in stage_keys(recipe, facts).items()}


def changed_stages(*overrides: str, base: tuple[str, ...] = ()) -> set[str]:
    """The stages whose hash an override changes."""
    before, after = hashes(tiny(*base)), hashes(tiny(*base, *overrides))
    assert before.keys() == after.keys()
    return {stage for stage in before if before[stage] != after[stage]}


def holders(recipe: Recipe, key: str) -> set[str]:
    return {stage for stage, keys in stage_keys(recipe, FACTS).items() if key in keys}


# --- result keys and execution keys


def dotted(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in dotted(inner, f"{prefix}{name}.").items()}
    return {prefix.rstrip("."): value}


def is_execution(key: str) -> bool:
    """Whether contract 14 counts the key as an execution key; checksums represent the data and the label file."""
    return (
        key.startswith("execution.")
        or key.endswith((".shards", ".root", ".csv", ".path_column", ".label_column", ".partial", ".allow_outside"))
        or key in ("labels.file", "labels.corrections", "batch.micro", "data.max_unreadable", "data.max_rejected")
        or key in ("incv.features_file", "incv.predictions_file")
        or key in ("model.pretrained", "model.weights")
    )


def test_result_keys_are_all_keys_but_the_execution_keys():
    recipe = tiny("model.options={width: 3}")
    every = dotted(recipe.model_dump(mode="json", by_alias=True))
    expected = {key: value for key, value in every.items() if not is_execution(key)}
    assert len(every) > len(expected) > 30
    assert dotted(default_keys(recipe) | result_keys(recipe)) == expected


def test_a_key_at_its_default_is_left_out_whether_written_or_not():
    plain, written = tiny(), tiny("incv.min_per_class=0", "coteaching.ramp_epochs=3", "order.kind=shuffled")
    assert result_keys(plain) == result_keys(written)
    assert "incv.min_per_class" not in result_keys(plain)
    assert result_keys(tiny("incv.min_per_class=1"))["incv.min_per_class"] == 1


def test_every_result_key_belongs_to_a_stage(monkeypatch):
    """A key that no stage reads could be changed without anything being redone."""
    recipe = tiny()
    held = set().union(*stage_keys(recipe, FACTS).values())
    assert set(result_keys(recipe)) | set(FACTS) == held
    unlisted = set(method_names()) - set(METHODS)  # whose sections are null
    every = {key: v for key, v in (result_keys(recipe) | default_keys(recipe)).items() if key not in unlisted}
    monkeypatch.setattr("trainer.run.stage_graph.result_keys", lambda _: every)  # as if no key were at its default
    held = set().union(*stage_keys(recipe, FACTS).values())
    assert set(every) | set(FACTS) == held


@pytest.mark.parametrize("name", ExecutionConfig.model_fields)
def test_no_execution_key_is_in_a_hash(name):
    recipe = tiny()
    other = recipe.model_copy(update={"execution": recipe.execution.model_copy(update={name: "something else"})})
    assert other != recipe
    assert hashes(other) == hashes(recipe)


@pytest.mark.parametrize(
    "override",
    [
        "execution.workers=7",
        "execution.checkpoint_every=1",
        "data.train.shards=elsewhere",
        "data.train.root=/raw",
        "data.eval.test.shards=elsewhere",
        "data.eval.test.root=/raw",
    ],
)
def test_where_and_how_fast_changes_no_hash(override):
    assert tiny(override) != tiny()
    assert changed_stages(override) == set()


def test_a_label_file_counts_by_its_content_not_its_path():
    base = ("labels.noise=none", "labels.ratio=0")
    assert changed_stages("labels.file=/a.csv", base=base) == set()
    recipe = tiny(*base, "labels.file=/a.csv")
    before = hashes(recipe, {**FACTS, "labels.file_checksum": "1"})
    after = hashes(recipe, {**FACTS, "labels.file_checksum": "2"})
    assert {stage for stage in before if before[stage] != after[stage]} == set(STAGES) - {"pack"}


def test_corrections_count_by_their_content_not_their_path():
    assert changed_stages("labels.corrections=/a.csv") == set()
    recipe = tiny("labels.corrections=/a.csv")
    before = hashes(recipe, {**FACTS, "labels.corrections_checksum": "1"})
    after = hashes(recipe, {**FACTS, "labels.corrections_checksum": "2"})
    assert {stage for stage in before if before[stage] != after[stage]} == set(STAGES) - {"pack"}


def test_other_data_redo_what_reads_them():
    before = hashes(tiny())
    after = hashes(tiny(), {**FACTS, "data.train.checksum": "cccc"})
    assert {stage for stage in before if before[stage] != after[stage]} == set(STAGES) - {"pack"}
    after = hashes(tiny(), {**FACTS, "data.eval.test.checksum": "cccc"})
    assert {stage for stage in before if before[stage] != after[stage]} == {"evaluate", "report"}


# --- which key belongs to which stage


@pytest.mark.parametrize(
    ("override", "redone"),
    [
        ("seed=1", set(STAGES) - {"pack"}),
        ("labels.ratio=0.2", set(STAGES) - {"pack"}),
        ("data.train.limit=200", set(STAGES) - {"pack"}),
        ("model.name=cifar_resnet20", {"incv", *METHODS, *FOLLOWERS}),
        ("batch.global=16", {"incv", *METHODS, *FOLLOWERS}),
        ("incv.rounds=3", {"incv", "coteaching_incv", *FOLLOWERS}),
        ("incv.optimizer.learning_rate=0.1", {"incv", "coteaching_incv", *FOLLOWERS}),
        ("standard.epochs=6", {"standard", *FOLLOWERS}),
        ("coteaching.epochs=6", {"coteaching", "coteaching_incv", *FOLLOWERS}),
        ("coteaching.rank=eval_first", {"coteaching", "coteaching_incv", *FOLLOWERS}),
        ("coteaching.forget_rate=0.4", {"coteaching", *FOLLOWERS}),
        ("coteaching_incv.noise_of_selected=0.1", {"coteaching_incv", *FOLLOWERS}),
        ("coteaching_incv.warmup_epochs=1", {"coteaching_incv", *FOLLOWERS}),
        ("data.eval.test.limit=50", {"evaluate", "report"}),
    ],
)
def test_a_key_redoes_the_stages_that_read_it_and_those_that_follow(override, redone):
    assert changed_stages(override) == redone


def test_which_method_holds_which_key_of_coteaching():
    recipe = tiny()
    methods_and_before = {"pack", "labels", "incv", *METHODS}
    assert holders(recipe, "coteaching.epochs") & methods_and_before == {"coteaching"}
    assert holders(recipe, "coteaching_incv.epochs") & methods_and_before == {"coteaching_incv"}
    assert holders(recipe, "coteaching.forget_rate") & methods_and_before == {"coteaching"}
    assert holders(recipe, "coteaching_incv.noise_of_selected") & methods_and_before == {"coteaching_incv"}
    assert "evaluate" in holders(recipe, "coteaching.epochs")


def test_coteaching_follows_from_incv_only_where_it_reads_the_estimate():
    assert "coteaching" not in changed_stages("incv.epochs=6")
    assert "coteaching" in changed_stages("incv.epochs=6", base=("coteaching.forget_rate=estimate",))
    assert find_stage("coteaching").inputs(tiny()) == ["labels"]
    assert find_stage("coteaching").inputs(tiny("coteaching.forget_rate=estimate")) == ["labels", "incv"]


def test_packing_reads_no_result_key():
    assert stage_keys(tiny(), FACTS)["pack"] == {}


# --- the graph

VARIANTS = {
    "all": (),
    "estimate": ("coteaching.forget_rate=estimate",),
    "one method": ("methods=[standard]",),
    "one method, no incv": ("methods=[standard]", "incv=null"),
    "methods out of order": ("methods=[coteaching_incv, standard]",),
    "no evaluation": ("data.eval={}",),
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_inputs_come_before_the_stages_that_read_them(overrides):
    recipe = tiny(*overrides)
    stages = stages_of(recipe)
    assert stages == [stage for stage in STAGES if stage in stages]
    for stage in stages:
        for needed in find_stage(stage).inputs(recipe):
            assert needed in stages, f"{stage} needs {needed}"
            assert STAGES.index(needed) < STAGES.index(stage), f"{stage} needs {needed}"


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_a_stage_holds_all_keys_of_its_inputs(overrides):
    """What redoes an input redoes the stage."""
    recipe = tiny(*overrides)
    keys = stage_keys(recipe, FACTS)
    for stage in keys:
        for needed in find_stage(stage).inputs(recipe):
            assert keys[needed].items() <= keys[stage].items()


def test_stages_follow_the_recipe():
    assert stages_of(tiny()) == list(STAGES) == [stage for stage in all_stages() if stage in STAGES]
    assert stages_of(tiny("methods=[standard]", "incv=null")) == [
        "pack",
        "labels",
        "standard",
        "evaluate",
        "export",
        "report",
    ]
    assert "evaluate" not in stages_of(tiny("data.eval={}"))
    demo = load_recipe(RECIPES / "demo.yaml")
    assert stages_of(demo) == [stage for stage in STAGES if stage not in METHODS or stage in demo.methods]


# --- the record of a run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def book(run: RunDirectory, *overrides: str) -> StageLedger:
    return StageLedger(tiny(*overrides), FACTS, run, Manifest(run))


def carry_out(run: RunDirectory, *stages: str) -> None:
    """Stages recorded as done, with files that stand for their outputs."""
    one = book(run)
    for stage in stages:
        one.begin(stage)
        for output in find_stage(stage).outputs(run):
            if output.suffix:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(stage)
            else:
                (output / "checkpoints" / "step-0000000002").mkdir(parents=True)
                (output / "metrics.jsonl").write_text('{"step": 2}\n')
        one.finish(stage, 1.5, done=True)


def test_a_stage_is_to_do_then_half_done_then_done(run):
    assert book(run).status("incv").state == "to do"
    book(run).begin("incv")
    assert book(run).status("incv").state == "half done"
    going_on = book(run)
    going_on.finish("incv", 2.0, done=False)
    assert book(run).status("incv").state == "half done"
    going_on.finish("incv", 3.0, done=True)
    assert book(run).status("incv").state == "done"
    assert Manifest(run).stages["incv"]["seconds"] == 5.0  # of both attempts


def test_other_result_keys_change_a_stage_and_other_execution_keys_do_not(run):
    carry_out(run, "labels", "standard")
    assert book(run, "execution.workers=9").status("standard").state == "done"
    assert book(run, "coteaching.epochs=9").status("standard").state == "done"
    status = book(run, "standard.epochs=9").status("standard")
    assert status.state == "changed"
    assert status.changes == ("standard.epochs (5 -> 9)",)
    assert book(run, "standard.epochs=9").status("labels").state == "done"


def test_the_report_is_always_made_anew(run):
    carry_out(run, "report")
    assert book(run).status("report").state == "to do"


def test_a_change_of_a_finished_stage_is_refused_by_key_and_stages(run):
    carry_out(run, "labels", "incv", "standard", "coteaching_incv")
    book(run).require_unchanged([])
    with pytest.raises(ConfigError) as refusal:
        book(run, "incv.rounds=5").require_unchanged([])
    message = str(refusal.value)
    assert "incv.rounds (2 -> 5)" in message
    assert "To redo incv, coteaching_incv, add" in message
    assert "`--redo incv`" in message
    assert "standard" not in message
    with pytest.raises(ConfigError, match="--redo standard"):
        book(run, "incv.rounds=5", "standard.epochs=1").require_unchanged(["incv"])


def test_a_method_more_is_refused_once_all_were_evaluated(run):
    carry_out(run, "labels", "incv", "evaluate")
    with pytest.raises(ConfigError, match=r"methods \(.*To redo evaluate, add"):
        book(run, "methods=[standard, coteaching_incv]").require_unchanged([])


def test_asking_for_the_redo_of_a_stage_allows_its_followers_too(run):
    carry_out(run, "labels", "incv", "standard", "coteaching_incv", "evaluate")
    book(run, "incv.rounds=5").require_unchanged(["incv"])
    book(run, "seed=5").require_unchanged(["labels"])


def test_redo_moves_the_stage_and_its_followers_to_old(run):
    carry_out(run, "labels", "incv", "standard", "coteaching", "coteaching_incv", "evaluate")
    book(run, "incv.rounds=5").redo(["incv"])
    assert set(Manifest(run).stages) == {"labels", "standard", "coteaching"}
    for gone in (run.selection, run.incv, run.rounds, run.method("coteaching_incv"), run.evaluation):
        assert not gone.exists()
    assert run.labels.exists()
    assert run.method("standard").exists()
    (kept,) = run.old.iterdir()
    assert (kept / "selection.parquet").read_text() == "incv"
    assert (kept / "methods" / "coteaching_incv" / "checkpoints").is_dir()
    assert (kept / "evaluation.json").exists()


def test_redo_goes_on_with_what_an_interrupted_redo_began(run):
    carry_out(run, "labels", "standard")
    book(run).redo(["standard"])
    old = set(run.old.rglob("*"))
    carry_out(run, "labels", "standard")
    book(run).begin("standard")  # half done, with these very keys and a checkpoint
    book(run).redo(["standard"])
    assert run.method("standard").exists()
    assert set(run.old.rglob("*")) == old
    assert book(run).status("standard").state == "half done"


def test_redo_of_a_half_done_stage_begins_it_anew(run):
    carry_out(run, "labels", "standard")
    book(run).begin("standard")
    book(run).redo(["standard"])
    assert not run.method("standard").exists()
    assert book(run).status("standard").state == "to do"


def test_redo_does_not_go_on_where_the_checkpoints_are_lost(run):
    carry_out(run, "labels", "standard")
    one = book(run)
    one.begin("standard")
    (run.method("standard") / "checkpoints" / "step-0000000002").rmdir()
    one.redo(["standard"])
    assert book(run).status("standard").state == "to do"
    assert not run.method("standard").exists()
    assert len(list(run.old.rglob("metrics.jsonl"))) == 1


@pytest.mark.parametrize(
    ("redo", "only", "says"),
    [
        (["incvv"], None, "--redo incvv"),
        (["labels", "coteaching"], None, "--redo coteaching"),
        ([], "pack", "incv pack"),
        ([], "coteaching", "incv coteaching"),
    ],
    ids=["no stage", "not of this recipe", "packing", "as a command"],
)
def test_a_stage_that_the_recipe_has_not_is_refused_with_those_it_has(redo, only, says):
    recipe = tiny("methods=[standard, coteaching_incv]")
    with pytest.raises(ConfigError, match=rf"{says}.*labels, incv, standard, coteaching_incv, evaluate"):
        require_stages(redo, only, recipe)
    require_stages(["pack", "labels", "report"], "incv", recipe)


def test_redo_pack_redoes_the_stages_whose_data_have_changed(run):
    carry_out(run, *STAGES[1:])
    assert book(run).with_followers(["pack"]) == []
    of_test = StageLedger(tiny(), {**FACTS, "data.eval.test.checksum": "cccc"}, run, Manifest(run))
    assert of_test.with_followers(["pack"]) == ["evaluate", "report"]
    of_train = StageLedger(tiny(), {**FACTS, "data.train.checksum": "cccc"}, run, Manifest(run))
    assert of_train.with_followers(["pack"]) == list(STAGES[1:])
    with pytest.raises(ConfigError, match=r"data\.train\.checksum"):
        of_train.require_unchanged([])
    of_train.require_unchanged(["pack"])
    both = StageLedger(tiny("seed=1"), {**FACTS, "data.train.checksum": "cccc"}, run, Manifest(run))
    with pytest.raises(ConfigError, match=r"seed.*--redo labels"):
        both.require_unchanged(["pack"])


CORRECTED = ("methods=[standard, coteaching, forward_correction]", "forward_correction={epochs: 3}")


def test_a_method_that_reads_anothers_network_follows_it():
    recipe = tiny(*CORRECTED)
    assert find_stage("forward_correction").inputs(recipe) == ["labels", "standard"]
    assert "standard.epochs" in stage_keys(recipe, FACTS)["forward_correction"]
    assert changed_stages("standard.epochs=6", base=CORRECTED) == {"standard", "forward_correction", *FOLLOWERS}
    assert changed_stages("forward_correction.epochs=6", base=CORRECTED) == {"forward_correction", *FOLLOWERS}
    assert "forward_correction" not in changed_stages("coteaching.epochs=6", base=CORRECTED)


def test_redoing_a_method_redoes_those_that_read_its_network(run):
    ledger = StageLedger(tiny(*CORRECTED), FACTS, run, Manifest(run))
    assert ledger.with_followers(["standard"]) == ["standard", "forward_correction", "evaluate", "export", "report"]
    with pytest.raises(ConfigError, match="forward_correction needs labels"):
        ledger.require_inputs("forward_correction")


def test_a_method_whose_source_is_not_trained_is_refused():
    with pytest.raises(ConfigError, match=r"forward_correction reads the network.*standard trains: add standard to"):
        tiny("methods=[coteaching, forward_correction]", "forward_correction={epochs: 3}")


def test_a_stage_needs_its_inputs(run):
    with pytest.raises(ConfigError, match=r"coteaching_incv needs incv.*`incv incv`"):
        book(run).require_inputs("coteaching_incv")
    carry_out(run, "labels", "incv")
    book(run).require_inputs("coteaching_incv")
    book(run).begin("incv")
    with pytest.raises(ConfigError, match="needs incv"):
        book(run).require_inputs("coteaching_incv")


def test_a_finished_stage_needs_its_files(run):
    carry_out(run, "incv", "labels")
    book(run).require_outputs("incv")
    run.selection.unlink()
    with pytest.raises(DataError, match=r"selection\.parquet is missing.*--redo incv"):
        book(run).require_outputs("incv")
    run.true_labels.unlink()  # not every data set has them
    book(run).require_outputs("labels")
