"""The demo's promises: estimates near the true noise for every noise kind, and the figures of the README."""

from pathlib import Path

import pytest

from shards.durable import read_json
from trainer.cli import main
from trainer.config.shipped import recipe_path
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

SHARDS = ("data.train.shards={0}/train", "data.eval.test.shards={0}/test")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    return [override.format(folder) for override in SHARDS]


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(
            ["labels.noise=none", "labels.ratio=0.0", "labels.source_is_true=true"],
            id="clean",
            marks=pytest.mark.slow,
        ),
        pytest.param(["labels.ratio=0.2"], id="symmetric 0.2"),
        pytest.param(["labels.ratio=0.6"], id="symmetric 0.6", marks=pytest.mark.slow),
        pytest.param(["labels.noise=asymmetric", "labels.ratio=0.3"], id="pair flip 0.3", marks=pytest.mark.slow),
    ],
)
def test_the_confident_estimate_is_near_the_truth(noise, shards, tmp_path):
    """Within 0.06, on the demo's first round."""
    recipe = load_recipe(recipe_path("demo"), [*shards, *noise, "incv.rounds=1"])
    for stage in ("labels", "incv"):
        assert run_recipe(recipe, "demo", tmp_path / "run", only=stage) == 0
    found = write_report(RunDirectory(tmp_path / "run"))["noise"]
    assert abs(found["confident"] - found["true"]) <= 0.06


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_seeds_of_the_demo_meet_their_figures(shards, tmp_path):
    gains = []
    for seed in (0, 1, 2):
        run = tmp_path / str(seed)
        assert main(["run", "-c", "demo", "--run-dir", str(run), f"seed={seed}", *shards]) == 0
        report = read_json(run / "report.json")
        last, accuracy = report["rounds"][-1], report["accuracy"]["test"]
        assert last["label_precision"] >= 0.97
        assert last["label_recall"] >= 0.93
        assert accuracy["coteaching_incv"]["top1"] >= 97.0
        assert accuracy["coteaching_incv"]["top1"] > accuracy["standard"]["top1"]
        assert abs(report["noise"]["confident"] - report["noise"]["true"]) <= 0.05
        assert _steps(run, "standard") >= _steps(run, "coteaching_incv")
        gains.append(accuracy["coteaching_incv"]["top1"] - accuracy["standard"]["top1"])
    assert sum(gains) / 3 >= 3.0


def _steps(run: Path, method: str) -> int:
    return read_json(run / "methods" / method / "training.json")["steps"]
