"""A stage is one record: ledger, dry run, estimate, stage loop, report and comparison iterate over the list."""

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from shards.durable import read_json
from tests.support import RECIPES
from trainer.config.recipe_file import recipe_yaml
from trainer.distributed.world import SINGLE_PROCESS
from trainer.estimate.cost import CostModel, PhaseCost
from trainer.estimate.dry_run import describe_plan
from trainer.estimate.probe import count_network
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.run.ledger import StageLedger
from trainer.run.plan import RunPlan
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe
from trainer.run.stage_graph import STAGES, Stage, all_stages, find_stage, list_stages, stage_keys, stages_of
from trainer.run.stages import StageRunner

FACTS = {"data.train.checksum": "aaaa"}


def run_toy(stages: StageRunner, name: str) -> Iterator[None]:
    yield
    if stages.ctx.world.is_rank0:
        (stages.run.root / "toy.txt").write_text(f"{name} of {len(stages.data.labels.ids)} samples")


def estimate_toy(model: CostModel, name: str, gpus: int) -> list[PhaseCost]:
    return [PhaseCost(name, 1, model.samples, {"arithmetic": 60.0}, 0.0, False)]


TOY = Stage(
    name="toy",
    run=f"{__name__}:run_toy",
    inputs=lambda recipe: ("labels",),
    reads=lambda recipe: ("precision",),
    outputs=lambda run: (run.root / "toy.txt",),
    required_outputs=lambda run: (run.root / "toy.txt",),
    describe=lambda recipe, sizes: f"play in {recipe.precision}",
    estimate=f"{__name__}:estimate_toy",
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage between the training methods and the evaluation."""
    place = next(i for i, each in enumerate(STAGES) if isinstance(each, Stage) and each.name == "evaluate")
    monkeypatch.setattr("trainer.run.stage_graph.STAGES", [*STAGES[:place], TOY, *STAGES[place:]])
    return TOY


def test_the_code_that_records_name_exists() -> None:
    for stage in list_stages():
        for named in (stage.run, stage.estimate):
            assert named is None or callable(resolve_name(named))


@pytest.mark.usefixtures("toy")
def test_graph_estimate_and_dry_run_contain_a_new_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(RECIPES / "tiny.yaml")
    assert all_stages().index("toy") == all_stages().index("evaluate") - 1
    assert stages_of(recipe)[-4:] == ["toy", "evaluate", "export", "report"]
    keys = stage_keys(recipe, FACTS)["toy"]
    assert keys.items() >= stage_keys(recipe, FACTS)["labels"].items()
    assert "toy" in find_stage("report").inputs(recipe)
    lines = describe_plan(recipe, "tiny", tmp_path / "run").splitlines()
    assert "  toy              to do      play in fp32" in lines
    model = CostModel(recipe, count_network("digits_cnn", 10, 8, {}, "all"), 400, 10)
    assert [phase.seconds for phase in model.cost_run(1) if phase.stage == "toy"] == [60.0]


@pytest.mark.usefixtures("toy")
def test_the_ledger_refuses_and_redoes_a_new_stage(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ledger = StageLedger(load_recipe(RECIPES / "tiny.yaml"), FACTS, run, Manifest(run))
    assert ledger.with_followers(["toy"]) == ["toy", "report"]
    assert "toy" in ledger.with_followers(["labels"])
    ledger.begin("toy")
    ledger.finish("toy", 1.0, done=True)
    assert ledger.status("toy").state == "done"
    other = StageLedger(load_recipe(RECIPES / "tiny.yaml", ["precision=bf16"]), FACTS, run, Manifest(run))
    assert other.status("toy").changed_keys == ("precision",)


def test_the_manifest_keeps_the_stages_in_order(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    manifest = Manifest(run)
    ledger = StageLedger(load_recipe(RECIPES / "tiny.yaml"), FACTS, run, manifest)
    for stage in ("report", "labels", "export", "standard", "incv", "evaluate"):
        ledger.begin(stage)
        ledger.finish(stage, 1.0, done=True)
    ordered = ["labels", "incv", "standard", "evaluate", "export", "report"]
    assert list(manifest.stages) == ordered
    assert [entry["seconds"] for entry in Manifest(run).stages.values()] == [1.0] * len(ordered)


@pytest.mark.usefixtures("toy")
def test_a_run_executes_a_new_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("methods=[standard]", "incv=null", "standard.epochs=1", "data.train.limit=100")
    root = tmp_path / "run"
    assert run_recipe(load_recipe(RECIPES / "tiny.yaml", overrides), "tiny", root) == 0
    assert (root / "toy.txt").read_text() == "toy of 100 samples"
    assert read_json(root / "manifest.json")["stages"]["toy"]["state"] == "done"
    assert list(read_json(root / "report.json")["time_s"]) == stages_of(load_recipe(root / "config.resolved.yaml"))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_survives_the_round_trip_of_the_plan(path: Path) -> None:
    plan = RunPlan(load_recipe(path), Path("weights.safetensors"))
    received = RunPlan.from_json(SINGLE_PROCESS.broadcast_from_rank0(plan.to_json))
    assert received == plan
    assert recipe_yaml(received.recipe) == recipe_yaml(plan.recipe)
