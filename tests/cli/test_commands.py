"""The `incv` commands on valid input, and what a second command in the same directory may do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.durable import read_json
from tests.support import RECIPES, REPOSITORY
from tests.support.command_line import THREADS, TINY, Answer, contents, times, unchanged
from trainer.cli import main
from trainer.incv.selection_index import SelectionIndex

Incv = Callable[..., Answer]
HERE = ("--run-dir", "run", THREADS)
METHODS = ("standard", "coteaching", "coteaching_incv")
STAGES = ("pack", "labels", "incv", *METHODS, "evaluate", "export", "report")
"""Those of recipes/tiny.yaml."""


def last_weights(run_dir: Path, training: str) -> bytes:
    newest = max((run_dir / training / "checkpoints").glob("step-*"))
    return (newest / "tensors.safetensors").read_bytes()


# --- the plan -----------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_writes_nothing(incv: Incv, playground: Path) -> None:
    with unchanged(playground):
        answer = incv("run", "-c", TINY, "--dry-run")
    assert answer.code == 0, answer.err
    assert re.findall(r"^  (\w+) +(?:to do|done|always run)", answer.out, re.MULTILINE) == list(STAGES)
    assert re.findall(r"^  (\w+) +to do", answer.out, re.MULTILINE) == list(STAGES[1:-1])
    assert "refused" not in answer.out
    assert "2 rounds of 2 folds" in answer.out
    assert "25 steps" in answer.out  # 150 samples, batches of 32, 5 epochs


def test_a_dry_run_in_a_finished_directory_says_what_is_done(incv: Incv, finished: Path) -> None:
    before = times(finished)
    with unchanged(finished):
        done = incv("run", "-c", TINY, "--dry-run", *HERE)
        changed = incv("run", "-c", TINY, "--dry-run", *HERE, "coteaching.epochs=6")
    assert times(finished) == before
    assert re.findall(r"^  (\w+) +done", done.out, re.MULTILINE) == list(STAGES[:-1])
    states = dict(re.findall(r"^  (\w+) +(done|changed)", changed.out, re.MULTILINE))
    assert states["standard"] == "done"
    assert states["coteaching"] == states["coteaching_incv"] == "changed"
    assert "would be refused" in changed.out
    assert "coteaching.epochs" in changed.out
    again = incv("run", "-c", TINY, "--dry-run", *HERE, "--redo", "evaluate")
    assert re.findall(r"^  (\w+) +redo", again.out, re.MULTILINE) == ["evaluate"]
    unknown = incv("run", "-c", TINY, "--dry-run", "model.name=resnet10x")
    assert "would be refused: unknown model" in unknown.out


def test_a_dry_run_refuses_the_folders_that_the_run_would_refuse(incv: Incv, playground: Path) -> None:
    resized = incv("run", "-c", TINY, "--dry-run", "data.train.resize=12")
    assert "would be refused" in resized.out
    assert "packed with resize null; the recipe asks for 12" in resized.out
    (playground / "taken").mkdir()
    (playground / "taken" / "thesis.txt").write_text("mine")
    taken = incv("run", "-c", TINY, "--dry-run", "data.train.shards=taken")
    assert "would be refused: taken contains thesis.txt" in taken.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("asked", ["execution.device=cuda", "execution.graphs=true"])
def test_what_needs_a_gpu_is_refused_before_anything_is_written(incv: Incv, playground: Path, asked: str) -> None:
    describe_plan = incv("run", "-c", TINY, "--dry-run", asked)
    assert describe_plan.code == 0
    with unchanged(playground):
        refused = incv("run", "-c", TINY, asked)
    assert refused.code == 2
    reason = refused.err.strip().removeprefix("incv: error: ")
    assert "GPU" in reason
    assert f"would be refused: {reason}" in describe_plan.out


def test_a_reader_that_leaves_early_is_no_error(playground: Path) -> None:
    """As with `incv run --dry-run | head`; this one has left before the first line."""
    command = f"set -o pipefail; {sys.executable} -m trainer ls | true"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    answer = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (141, "")


def test_ctrl_c_before_a_run_has_begun_is_told_in_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    os.mkfifo(recipe)
    command = [sys.executable, "-m", "trainer", "validate", "-c", str(recipe)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    with recipe.open("w"):  # returns once the command waits for the recipe's text
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "incv: interrupted\n")


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch, playground: Path) -> None:
    def broken(_parsed: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("trainer.commands.recipes._list", broken)
    with pytest.raises(BrokenPipeError):
        main(["ls"])


def test_a_redo_means_the_run_of_its_keys_or_else_the_one_they_change(incv: Incv, playground: Path) -> None:
    asked = ("run", "-c", TINY, "seed=1", "--print-run-dir")
    own = Path(incv(*asked).out.strip())
    assert incv(*asked, "--redo", "standard").out.strip() == str(Path("runs") / "tiny")
    own.mkdir(parents=True)
    assert incv(*asked, "--redo", "standard").out.strip() == str(own)


def test_the_resolved_recipe_of_a_run_is_its_recipe(finished: Path, incv: Incv) -> None:
    """Its runs are runs of the same recipe, and each can be continued from its own resolved recipe."""
    resolved = finished / "config.resolved.yaml"
    assert incv("run", "-c", resolved, "--print-run-dir").out.strip() == f"runs/{finished.name}"
    assert incv("run", "-c", resolved, "seed=9", "--print-run-dir").out.startswith(f"runs/{finished.name}-")
    again = incv("run", "-c", resolved, "--run-dir", finished)
    assert again.code == 0, again.err
    assert "standard: already done" in again.err
    for origin, run in ((finished, "second"), (Path("second"), "third")):
        for recipe, more in ((origin, ["seed=9"]), (Path(run), [])):
            answer = incv("labels", "-c", recipe / "config.resolved.yaml", *more, "--run-dir", run)
            assert answer.code == 0, answer.err
            assert read_json(Path(run, "manifest.json"))["recipe"] == "tiny"
        assert "labels: already done" in answer.err


def test_a_copied_resolved_recipe_is_named_after_its_folder(finished: Path, incv: Incv) -> None:
    for number, manifest in enumerate((None, "", "[]", '{"recipe": null}')):
        folder = Path(f"mine{number}")
        folder.mkdir()
        shutil.copyfile(finished / "config.resolved.yaml", folder / "config.resolved.yaml")
        if manifest is not None:
            (folder / "manifest.json").write_text(manifest)
        assert incv("labels", "-c", folder / "config.resolved.yaml", "--run-dir", f"run{number}").code == 0
        assert read_json(Path(f"run{number}/manifest.json"))["recipe"] == folder.name


def test_a_dry_run_ends_with_an_estimate(incv: Incv, playground: Path) -> None:
    """Of every stage that computes, for as many GPUs as asked for; by default for the processes that are there."""
    alone = incv("run", "-c", TINY, "--dry-run").out
    plan, estimate = alone.split("\n\n", 1)
    assert "300 training samples (packed), 10 classes" in estimate
    assert "on this machine" in estimate
    stages = [stage for stage in STAGES if stage in ("incv", *METHODS, "evaluate")]
    assert re.findall(r"^  time of (\w+) +[\d.e-]+ s", estimate, re.MULTILINE) == stages
    several = incv(
        "run", "-c", TINY, "--dry-run", "--gpus", "2,8,64", "--gpu-price", "1.5", "--samples", "100000"
    ).out
    assert several.startswith(plan)
    assert re.search(r"^ +2 GPUs +8 GPUs$", several, re.MULTILINE)
    assert "64 GPUs would be refused: batch.global = 32 rows" in several
    assert "1.50 dollars" in several
    assert "100,000 training samples (from --samples)" in several
    promised = incv("run", "-c", TINY, "--dry-run", "execution.world=4", "execution.folds=side_by_side").out
    assert re.search(r"^ +4 GPUs$", promised, re.MULTILINE)
    odd = incv("run", "-c", TINY, "--dry-run", "--gpus", "3", "execution.folds=side_by_side").out
    assert "3 GPUs would be refused: `execution.folds: side_by_side` needs" in odd


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--gpus", "8"], ["--samples", "5"], ["--gpu-price", "1"]),
        *(["--dry-run", "--gpus", wrong] for wrong in ("0", "8,,9", "all")),
        *(["--dry-run", "--samples", "-1"], ["--dry-run", "--gpu-price", "nan"]),
    ],
)
def test_an_estimate_that_cannot_be_made_is_refused(arguments: list[str], incv: Incv, playground: Path) -> None:
    with unchanged(playground):
        answer = incv("run", "-c", TINY, *arguments)
    assert answer.code == 2
    assert arguments[-2] in answer.err


# --- the directory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "directory"),
    [
        ([], r"runs/tiny"),
        (["execution.log_every=1"], r"runs/tiny"),
        (["data.train.shards=elsewhere"], r"runs/tiny"),
        (["coteaching.epochs=6"], r"runs/tiny-[0-9a-f]{8}"),
        (["seed=1"], r"runs/tiny-[0-9a-f]{8}"),
        (["seed=0"], r"runs/tiny"),
        (["coteaching.epochs=6", "--redo", "coteaching"], r"runs/tiny"),
        (["coteaching.epochs=6", "--run-dir", "mine"], r"mine"),
    ],
)
def test_the_default_directory(arguments: list[str], directory: str, incv: Incv, playground: Path) -> None:
    answer = incv("run", "-c", TINY, "--dry-run", *arguments)
    assert re.search(rf"into {directory}$", answer.out, re.MULTILINE), answer.out


def test_runs_of_other_keys_do_not_meet(incv: Incv, playground: Path) -> None:
    for overrides in ([], ["seed=1"], ["seed=2"], ["seed=2", "execution.workers=1"]):
        assert incv("labels", "-c", TINY, *overrides).code == 0
    folders = sorted(path.name for path in (playground / "runs").iterdir())
    assert folders[0] == "tiny"
    assert len(folders) == 3
    assert all(re.fullmatch(r"tiny-[0-9a-f]{8}", name) for name in folders[1:])


def test_overrides_may_stand_between_options(incv: Incv, playground: Path) -> None:
    orders = [
        ["incv.epochs=7", "--dry-run", "-c", TINY, "standard.epochs=8", "--run-dir", "mine"],
        ["-c", TINY, "--dry-run", "incv.epochs=7", "--run-dir", "mine", "standard.epochs=8"],
        ["-c", TINY, "--run-dir", "mine", "incv.epochs=3", "--dry-run", *["incv.epochs=7", "standard.epochs=8"]],
    ]
    plans = {incv("run", *order, "--gpus", "1").out for order in orders}
    assert len(plans) == 1
    (plan,) = plans
    assert "into mine" in plan
    assert "7 epochs" in plan
    assert "8 epochs" in plan


def test_a_shipped_recipe_goes_by_its_name(incv: Incv, playground: Path) -> None:
    plan = ("--dry-run", "--gpus", "1")
    assert incv("run", "-c", "tiny", *plan).out == incv("run", "-c", TINY, *plan).out


# --- stages alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "missing"),
    [
        ("incv", "labels"),
        ("standard", "labels"),
        ("coteaching", "labels"),
        ("coteaching_incv", "incv"),
        ("evaluate", "standard"),
        ("export", "standard"),
        ("report", "labels"),
    ],
)
def test_a_stage_alone_needs_its_inputs(stage: str, missing: str, incv: Incv, playground: Path) -> None:
    answer = incv(stage, "-c", TINY, *HERE)
    assert answer.code == 2
    assert f"stage {stage} needs {missing}" in answer.err
    assert f"incv {missing}" in answer.err


def test_a_stage_that_the_recipe_does_not_have_is_refused(incv: Incv, playground: Path) -> None:
    answer = incv("coteaching", "-c", TINY, "methods=[standard]")
    assert answer.code == 2, "it was not carried out, and nothing said so"
    assert "coteaching" in answer.err
    assert "methods" in answer.err


def test_stages_one_by_one_are_the_whole_run(incv: Incv, playground: Path, finished_once: Path) -> None:
    for stage in STAGES[1:]:
        answer = incv(stage, "-c", TINY, *HERE)
        assert answer.code == 0, answer.err
    ours, theirs = Path("run"), finished_once
    checksums = {SelectionIndex.read(each / "selection.parquet").checksum() for each in (ours, theirs)}
    assert len(checksums) == 1
    for training in [f"rounds/{i}/fold{f}" for i in (0, 1) for f in (0, 1)] + [f"methods/{name}" for name in METHODS]:
        assert last_weights(ours, training) == last_weights(theirs, training), training
    assert read_json(ours / "evaluation.json") == read_json(theirs / "evaluation.json")
    files = [{path for path in contents(each) if not path.startswith("logs/")} for each in (ours, theirs)]
    assert files[0] == files[1]
    different = {"time_s", "pace", "starts"}
    reports = [
        {key: value for key, value in read_json(each / "report.json").items() if key not in different}
        for each in (ours, theirs)
    ]
    assert reports[0] == reports[1]


# --- a finished directory -----------------------------------------------------------------------------------


def _kept(run_dir: Path) -> dict[str, int]:
    """Times of all files but the record of starts and the report."""
    written = ("manifest.json", "config.resolved.yaml", "report.json", "report.html", ".lock")
    return {path: time for path, time in times(run_dir).items() if path not in written and path[:5] != "logs/"}


def test_a_finished_run_makes_only_its_report_anew(incv: Incv, finished: Path) -> None:
    before, kept = contents(finished), _kept(finished)
    (finished / "report.html").unlink()
    answer = incv("run", "-c", TINY, *HERE)
    assert answer.code == 0, answer.err
    assert _kept(finished) == kept
    assert contents(finished).keys() == before.keys()
    for stage in STAGES[1:-1]:
        assert f"{stage}: already done" in answer.err
    start = read_json(finished / "manifest.json")["starts"][-1]
    assert start["steps_executed"] == {}
    assert start["ended"] == "finished"
    assert "accuracy on test" in answer.out
    assert "report.html" in answer.out


def test_execution_keys_may_change(incv: Incv, finished: Path) -> None:
    kept = _kept(finished)
    answer = incv("run", "-c", TINY, "--run-dir", "run", "execution.log_every=1", "execution.threads=2")
    assert answer.code == 0, answer.err
    assert _kept(finished) == kept


def test_a_changed_result_key_is_refused_by_name(incv: Incv, finished: Path) -> None:
    with unchanged(finished):
        answer = incv("run", "-c", TINY, *HERE, "coteaching.epochs=6")
    assert answer.code == 2
    assert "coteaching.epochs (5 -> 6)" in answer.err
    assert "To redo coteaching, coteaching_incv, evaluate, export, add" in answer.err
    assert "--redo coteaching --redo coteaching_incv" in answer.err
    assert "--run-dir" in answer.err


@pytest.mark.parametrize(("given", "other"), [("coteaching", "coteaching_incv"), ("coteaching_incv", "coteaching")])
def test_half_a_redo_is_refused_and_names_the_other(given: str, other: str, incv: Incv, finished: Path) -> None:
    with unchanged(finished):
        answer = incv("run", "-c", TINY, *HERE, "coteaching.epochs=6", "--redo", given)
    assert answer.code == 2
    assert f"{other}.epochs" in answer.err
    assert re.search(rf"`--redo {other}`", answer.err)


def test_a_redo_does_these_stages_again_and_what_follows(incv: Incv, finished: Path) -> None:
    before, kept = contents(finished), _kept(finished)
    redo = ("--redo", "coteaching_incv", "--redo", "coteaching")
    answer = incv("run", "-c", TINY, *HERE, "coteaching.epochs=6", *redo)
    assert answer.code == 0, answer.err
    after = contents(finished)
    untouched = [
        path for path in kept if re.match(r"rounds/|selection|incv|labels|methods/standard/(?!export)", path)
    ]
    assert any(path.startswith("rounds/1/fold1/checkpoints/") for path in untouched)
    assert {path: after[path] for path in untouched} == {path: before[path] for path in untouched}
    assert {path: times(finished)[path] for path in untouched} == {path: kept[path] for path in untouched}
    (stamp,) = (finished / "old").iterdir()
    for moved in ("methods/coteaching", "methods/coteaching_incv", "evaluation.json", "report.json", "report.html"):
        assert (stamp / moved).exists(), moved
    assert (stamp / "evaluation.json").read_bytes() == before["evaluation.json"]
    assert last_weights(stamp, "methods/coteaching") != last_weights(finished, "methods/coteaching")
    for method in ("coteaching", "coteaching_incv"):
        facts = read_json(finished / "methods" / method / "training.json")
        assert facts["epochs"] == 6
        start = read_json(finished / "manifest.json")["starts"][-1]
        assert start["steps_executed"][method] == facts["steps"]
    assert set(start["steps_executed"]) == {"coteaching", "coteaching_incv"}
    for method in METHODS:
        assert (finished / "methods" / method / "export" / "model_a" / "model.safetensors").exists()
    assert read_json(finished / "report.json")["config"]["coteaching"]["epochs"] == 6

    again = incv("run", "-c", TINY, *HERE, "coteaching.epochs=6")  # now these are the directory's keys
    assert again.code == 0, again.err
    assert len(list((finished / "old").iterdir())) == 1


@pytest.mark.parametrize(
    ("lost", "stage"),
    [
        ("selection.parquet", "incv"),
        ("incv.json", "incv"),
        ("labels.parquet", "labels"),
        ("methods/coteaching", "coteaching"),
        ("evaluation.json", "evaluate"),
    ],
)
def test_a_lost_output_is_not_made_again_unasked(lost: str, stage: str, incv: Incv, finished: Path) -> None:
    path = finished / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    answer = incv("run", "-c", TINY, *HERE)
    assert answer.code == 3
    assert lost in answer.err
    assert f"--redo {stage}" in answer.err
    assert not path.exists()


def test_a_lost_output_is_made_again_when_asked(incv: Incv, finished: Path, finished_once: Path) -> None:
    (finished / "evaluation.json").unlink()
    answer = incv("run", "-c", TINY, *HERE, "--redo", "evaluate")
    assert answer.code == 0, answer.err
    assert read_json(finished / "evaluation.json") == read_json(finished_once / "evaluation.json")


# --- the report ---------------------------------------------------------------------------------------------


def _is_share(value: Any) -> bool:
    return isinstance(value, float | int) and 0 <= value <= 1


def test_the_report_has_its_schema(finished_once: Path) -> None:
    report = json.loads((finished_once / "report.json").read_text(), parse_constant=pytest.fail)
    assert all(_is_share(report["noise"][kind]) for kind in ("paper", "confident", "true"))
    assert len(report["rounds"]) == 2
    for entry in report["rounds"]:
        assert all(isinstance(entry[count], int) for count in ("selected", "removed", "candidates"))
        assert entry["selected"] + entry["removed"] + entry["candidates"] == 300
        assert _is_share(entry["label_precision"])
        assert _is_share(entry["label_recall"])
        assert _is_share(entry["theory"]["label_precision"])
        assert _is_share(entry["theory"]["label_recall"])
    assert set(report["accuracy"]) == {"test"}
    assert set(report["accuracy"]["test"]) == set(METHODS)
    for method, result in report["accuracy"]["test"].items():
        networks = 1 if method == "standard" else 2
        assert len(result["top1_each"]) == networks
        assert result["top1"] == pytest.approx(sum(result["top1_each"]) / networks)
        assert 0 <= result["top1"] <= result["top5"] <= 100
        assert (result["top1_ensemble"] is None) == (networks == 1)
        assert result["count"] == 100
    assert list(report["time_s"]) == list(STAGES)
    assert all(isinstance(seconds, float | int) for seconds in report["time_s"].values())
    folds = [f"Round {round_}, fold {fold}" for round_ in (1, 2) for fold in (1, 2)]
    assert [each["training"] for each in report["pace"]][:4] == folds
    assert all(each["images_per_s"] > 0 and 0 <= each["data_wait"] <= 1 for each in report["pace"])
    assert report["ended_early"] is None


def test_rounds_that_end_early_are_said_in_the_report(incv: Incv, playground: Path) -> None:
    """Removing twice as many as are selected leaves nothing to judge."""
    answer = incv(
        *("run", "-c", TINY, *HERE, "incv.remove_ratio=2", "incv.rounds=6", "incv.epochs=4"),
        *("methods=[standard]", "standard.epochs=1"),
    )
    assert answer.code == 0, answer.err
    report = read_json(playground / "run" / "report.json")
    done = len(report["rounds"])
    assert 1 <= done < 6
    assert f"after {done} of 6 rounds" in report["ended_early"]
    assert report["rounds"][-1]["candidates"] < 2
    assert report["ended_early"] in (playground / "run" / "report.html").read_text()


# --- ls, cp, validate ---------------------------------------------------------------------------------------


def test_ls_lists_every_recipe_with_its_first_line(incv: Incv, playground: Path) -> None:
    answer = incv("ls")
    assert answer.code == 0
    names = [line.split()[0] for line in answer.out.splitlines()]
    assert names == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert re.search(r"^tiny +\S.+", answer.out, re.MULTILINE)


def test_cp_copies_a_recipe_and_never_overwrites(incv: Incv, playground: Path) -> None:
    answer = incv("cp", "tiny", "mine.yaml")
    assert answer.code == 0
    assert "incv run -c mine.yaml" in answer.out
    assert Path("mine.yaml").read_bytes() == Path(TINY).read_bytes()
    Path("mine.yaml").write_text("changed")
    again = incv("cp", "demo", "mine.yaml")
    assert again.code == 2
    assert "mine.yaml exists" in again.err
    assert Path("mine.yaml").read_text() == "changed"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["tinny", "mine.yaml"], "tinny"), (["tiny", "no/such/folder/mine.yaml"], "no/such/folder")],
)
def test_cp_that_cannot_be_done_is_refused(arguments: list[str], named: str, incv: Incv, playground: Path) -> None:
    with unchanged(playground):
        answer = incv("cp", *arguments)
    assert answer.code in (2, 3)
    assert named in answer.err


def test_validate(incv: Incv, playground: Path) -> None:
    with unchanged(playground):
        good = incv("validate", "-c", "tiny", "batch.global=8")
        bad = incv("validate", "-c", "tiny", "batch.globl=8")
        unknown = incv("validate", "-c", "tiny", "model.name=resnet181")
        misspelt = incv("validate", "-c", "tyni")
    assert good.code == 0
    assert "valid" in good.out
    assert bad.code == 2
    assert "`batch.global`" in bad.err
    assert (unknown.code, misspelt.code) == (2, 2)
    assert "resnet18" in unknown.err
    assert "did you mean tiny?" in misspelt.err


WRONG_LINES: dict[str, tuple[list[str], list[str]]] = {
    "no_command": ([], ["COMMAND", "`incv --help`"]),
    "misspelt_command": (["adit", "photos"], ["no command 'adit'", "did you mean audit?", "Known: audit, "]),
    "unlike_any_command": (["xyzzy"], ["no command 'xyzzy'", "Known: audit, "]),
    "misspelt_command_of_shards": (["shards", "pakc"], ["`incv shards` has no command 'pakc'", "did you mean pack?"]),
    "misspelt_option": (["run", "-c", "tiny", "--dryrun"], ["`incv run` has no option --dryrun", "--dry-run?"]),
    "misspelt_option_with_a_value": (["audit", "x", "--weight-file=y"], ["no option --weight-file", "--weights?"]),
    "unknown_option": (["run", "-c", "tiny", "--fast"], ["no option --fast", "`incv run --help`"]),
    "misspelt_choice": (["completion", "bsh"], ["no value 'bsh' for shell", "did you mean bash"]),
    "no_recipe": (["run"], ["-c FILE", "incv ls"]),
    "no_recipe_but_overrides": (["run", "seed=1"], ["-c FILE"]),
    "override_for_a_list": (["ls", "seed=1"], ["unexpected arguments: seed=1"]),
    "two_recipes": (["run", "tiny", "demo"], ["'demo'", "a.b=c"]),
    "a_word_beside_c": (["run", "-c", "tiny", "demo"], ["'demo'", "a.b=c"]),
}


@pytest.mark.parametrize("kind", WRONG_LINES)
def test_a_wrong_command_line_is_refused_in_one_line(kind: str, incv: Incv, playground: Path) -> None:
    arguments, named = WRONG_LINES[kind]
    with unchanged(playground):
        answer = incv(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("incv: error: ")
    assert answer.err.count("\n") == 1
    for words in named:
        assert words in answer.err


def test_a_recipe_may_be_named_without_c(incv: Incv, playground: Path) -> None:
    assert incv("validate", "tiny").out == incv("validate", "-c", "tiny").out
    overridden = ("labels.ratio=0.2", "--print-run-dir")
    expected = incv("run", "-c", "tiny", *overridden).out
    for arguments in (("tiny", *overridden), (*overridden, "tiny"), ("labels.ratio=0.2", "tiny", "--print-run-dir")):
        assert incv("run", *arguments).out == expected != ""


@pytest.mark.parametrize("program", [["-m", "trainer"], [str(Path(sys.executable).with_name("incv"))]])
def test_the_command_and_the_module_are_the_same(program: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *program, "validate", "-c", "tinny"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("incv: error: no recipe 'tinny'")
    assert list(tmp_path.iterdir()) == []


# --- what lies in a directory, and what does not -------------------------------------------------------------


def test_only_the_last_steps_weights_are_evaluated(incv: Incv, finished: Path) -> None:
    """A damaged last checkpoint has an older, readable one behind it, which is not the result of the training."""
    newest = max((finished / "methods/coteaching_incv/checkpoints").glob("step-*"))
    tensors = newest / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    answer = incv("run", "-c", TINY, *HERE, "--redo", "evaluate")
    assert answer.code == 3
    assert "--redo coteaching_incv" in answer.err
    shutil.rmtree(newest)
    assert incv("run", "-c", TINY, *HERE, "--redo", "evaluate").code == 3
    assert incv("run", "-c", TINY, *HERE, "--redo", "coteaching_incv").code == 0


def test_a_file_torn_by_a_kill_is_swept_away(incv: Incv, finished: Path) -> None:
    torn = [finished / ".manifest.json.tmp4711", finished / "rounds/0/.selection.parquet.tmp4711"]
    for file in torn:
        file.write_bytes(b"half")
    assert incv("run", "-c", TINY, *HERE).code == 0
    assert not any(file.exists() for file in torn)


def test_a_directory_with_nothing_but_a_torn_manifest_is_a_new_one(incv: Incv, playground: Path) -> None:
    (playground / "run").mkdir()
    (playground / "run" / ".manifest.json.tmp4711").write_bytes(b"half")
    assert incv("labels", "-c", TINY, *HERE).code == 0


def test_packing_stops_on_a_signal_and_goes_on(incv: Incv, playground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([False, True])
    monkeypatch.setattr("trainer.cli._listen", lambda: lambda: next(asked, True))
    pack = ("shards", "pack", "digits", "--out", "mine", "--workers", "1", "--samples-per-shard", "300")
    answer = incv(*pack)
    assert answer.code == 75
    assert not (playground / "mine/dataset.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(playground)
    assert incv(*pack).code == 0
    assert incv("shards", "verify", "mine").code == 0


def test_the_report_names_suspicious_samples_by_their_keys(finished: Path) -> None:
    suspects = read_json(finished / "report.json")["suspicious"]
    assert suspects
    assert all(re.fullmatch(r"digits/train/\d+", suspect["key"]) for suspect in suspects)
    assert suspects[0]["key"] in (finished / "report.html").read_text()
