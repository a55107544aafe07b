"""Decoupling and MentorNet through `incv run`: trained, evaluated, exported, reported, and resumed bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

import trainer.run.runner
from tests.support import RECIPES
from tests.support.many_runs import StoppingTrace
from tests.support.processes import pack_digits, run_here, step_folders
from tests.support.untimed import untimed
from trainer.run.export import load_network

METHODS = ("decoupling", "mentornet")
EPOCHS, PER_EPOCH = 5, 10  # 300 digits in batches of 32
KEYS = (
    "methods=[decoupling, mentornet]",
    "incv=null",
    *(f"{method}.epochs={EPOCHS}" for method in METHODS),
    *(f"{method}.optimizer.learning_rate=0.002" for method in METHODS),
    *("execution.threads=1", "execution.trace=true", "execution.log_every=1", "execution.checkpoint_every=10"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_digits(tmp_path_factory.mktemp("baselines"))


def command(folder: Path, name: str) -> list[str]:
    shards = [
        f"data.{part}.shards={folder}/data/shards/digits-{split}"
        for part, split in (("train", "train"), ("eval.test", "test"))
    ]
    return ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", str(folder / name), *KEYS, *shards]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    code, error = run_here(command(folder, "whole"))
    assert code == 0, error
    return folder / "whole"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def metrics(run: Path, method: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in untimed(run / "methods" / method / "metrics.jsonl").splitlines()]


def test_they_are_evaluated_exported_and_reported(whole: Path) -> None:
    evaluation = read(whole / "evaluation.json")["test"]
    assert {name: len(found["networks"]) for name, found in evaluation.items()} == {"decoupling": 2, "mentornet": 1}
    page = (whole / "report.html").read_text()
    assert "Decoupling" in page
    assert "MentorNet" in page
    assert read(whole / "methods" / "mentornet" / "training.json")["loss_percentile"] == 0.75
    assert load_network(whole / "methods" / "decoupling" / "export" / "model_b") is not None


def test_they_learn(whole: Path) -> None:
    for method in METHODS:
        lines = metrics(whole, method)
        assert len(lines) == EPOCHS * PER_EPOCH
        accuracy = [line["train_accuracy"] for line in lines]
        assert sum(accuracy[-10:]) > sum(accuracy[:10]) + 1.0


def test_the_networks_agree_more_and_more(whole: Path) -> None:
    shares = [line["disagreement"] for line in metrics(whole, "decoupling")]
    assert sum(shares[-10:]) < sum(shares[:10])


def test_the_curriculum_follows_the_steps(whole: Path) -> None:
    """50 steps: half of the rows are dropped in the first 9 (17 %), and large losses from the 11th (20 %) on."""
    weights = [line["mean_weight"] for line in metrics(whole, "mentornet")]
    assert 0.3 < sum(weights[:9]) / 9 < 0.7
    assert min(weights[9:10]) > 0.7
    assert sum(weights[10:45]) / 35 < 0.85


def test_a_stopped_run_ends_in_the_same_bits(folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of an epoch, with a threshold and rows to drop that a new process must find again."""
    monkeypatch.setattr(trainer.run.runner, "Trace", StoppingTrace)
    monkeypatch.setattr(StoppingTrace, "at", ("mentornet", 33))
    alone = [*command(folder, "stopped"), "methods=[mentornet]", "data.eval={}"]
    code, error = run_here(alone)
    assert code == 75, error
    monkeypatch.setattr(StoppingTrace, "at", None)
    code, error = run_here(alone)
    assert code == 0, error
    assert 33 < read(folder / "stopped" / "manifest.json")["starts"][1]["resumed"]["mentornet"] < 40
    ours, theirs = (run / "methods" / "mentornet" for run in (folder / "stopped", whole))
    assert untimed(ours / "metrics.jsonl") == untimed(theirs / "metrics.jsonl")
    last = [step_folders(each)[-1] / "tensors.safetensors" for each in (ours, theirs)]
    assert last[0].read_bytes() == last[1].read_bytes()
