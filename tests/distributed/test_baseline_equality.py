"""F-correction and D2L in worlds of 1, 2 and 3 processes: the same T, LIDs, turning point and weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shards.durable import read_json
from tests.support import processes
from tests.support.twin_training import distance
from tests.support.untimed import untimed
from tests.support.world_runs import Planned, launch, world_size
from trainer.training.checkpoint import read_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RATE = "optimizer: {kind: sgd, learning_rate: 0.002}"
KEYS = (
    "methods=[standard, forward_correction, d2l]",
    "incv=null",
    "model.name=frozen64",
    "data.train.limit=80",
    "batch.global=16",
    "standard.epochs=3",
    "standard.optimizer={kind: sgd, learning_rate: 0.002}",
    f"forward_correction={{epochs: 3, {RATE}}}",
    f"d2l={{epochs: 8, initial_epochs: 0, window: 2, neighbours: 5, lid_rows: 16, lid_batches: 2, {RATE}}}",
)
STOPS = (("d2l", 12), ("d2l", 22), None)
METHODS = ("standard", "forward_correction", "d2l")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    processes.pack_digits(folder)
    for size in (1, 2, 3):
        stopped = [Planned("stopped2", KEYS, stop) for stop in STOPS] if size == 2 else []
        launch(folder, size, [Planned(f"calm{size}", KEYS), *stopped])
        assert world_size(folder / f"calm{size}") == size
    return folder


def lines_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "methods/d2l/metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lid" in line]


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_do_what_one_does(place: Path, size: int) -> None:
    one, several = (place / f"calm{number}" for number in (1, size))
    facts = [read_json(run / "methods/forward_correction/training.json") for run in (one, several)]
    assert facts[0]["anchors"] == facts[1]["anchors"]
    np.testing.assert_allclose(facts[0]["transition"], facts[1]["transition"], rtol=0, atol=1e-7)
    for alone, ours in zip(lines_of(one), lines_of(several), strict=True):
        assert ours == pytest.approx(alone, abs=2e-5)
    assert any(line["alpha"] < 1 for line in lines_of(one)[:-1]), "the training was to turn"
    for method in METHODS:
        weights = [weights_of(run, method) for run in (one, several)]
        assert distance(*weights) < 1e-6, method


def weights_of(run: Path, method: str) -> dict[str, torch.Tensor]:
    tensors = read_checkpoint(processes.step_folders(run / "methods" / method)[-1]).tensors
    return {name: t for name, t in tensors.items() if name.startswith("model.") and t.is_floating_point()}


def test_two_processes_resume_bit_for_bit(place: Path) -> None:
    calm, stopped = place / "calm2", place / "stopped2"
    starts = read_json(stopped / "manifest.json")["starts"]
    assert [start["ended"] for start in starts] == ["stopped", "stopped", "finished"]
    for method in METHODS:
        last = [processes.step_folders(run / "methods" / method)[-1] for run in (stopped, calm)]
        for file in ("tensors.safetensors", "state.json"):
            assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), (method, file)
        metrics = [run / "methods" / method / "metrics.jsonl" for run in (stopped, calm)]
        assert untimed(metrics[0]) == untimed(metrics[1]), method
