"""Runs with the keys for own data (AdamW, cosine, ...), stopped and resumed bit for bit on 1 and 2 ranks."""

import math
from pathlib import Path

import pytest
import yaml

from shards.durable import read_json
from tests.support import processes
from tests.support.world_runs import Planned, launch

SECTIONS = ("incv", "standard", "coteaching")
OPTIMIZER = (
    "{kind: adamw, learning_rate: 0.002, schedule: cosine, warmup_epochs: 1, weight_decay: 0.05, "
    "decay_scope: weights}"
)
LENGTHS = ("incv.min_steps=70", "standard.min_steps=60", "coteaching.min_steps=100")
SMOOTHED = tuple(f"{section}.label_smoothing=0.1" for section in SECTIONS)
HELD_OUT = "data.eval_fraction=0.1"
AVERAGED = tuple(f"{section}.ema={{decay: 0.95}}" for section in SECTIONS)
KEYS = (
    *(f"{section}.optimizer={OPTIMIZER}" for section in SECTIONS),
    "batch.global=auto",
    *LENGTHS,
    *SMOOTHED,
    HELD_OUT,
    *AVERAGED,
    "evaluation={every: 2, choose_on: held_out}",
)
STOPS = (("incv/1/0", 7), ("standard", 13), ("coteaching", 9), ("coteaching_incv", 17))


def run_stopped_and_calm(folder: Path, size: int) -> tuple[Path, Path]:
    """A run that was stopped in several trainings, and one that was not, each on `size` ranks."""
    processes.pack_digits(folder)
    stopped = [Planned("stopped", KEYS, stop) for stop in (*STOPS, None)]
    launch(folder, size, [Planned("calm", KEYS), *stopped])
    return folder / "stopped", folder / "calm"


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.cluster)]
)
@pytest.mark.timeout(600)
def test_a_stopped_run_ends_with_the_bits_of_a_calm_one(size: int, tmp_path: Path) -> None:
    stopped, calm = run_stopped_and_calm(tmp_path, size)
    processes.require_same_results(stopped, calm)
    assert yaml.safe_load((calm / "config.resolved.yaml").read_text())["batch"]["global"] == 16
    training = read_json(calm / "methods/standard/training.json")
    assert (training["epochs"], training["steps"]) == (5, 85)  # enough steps: 270 samples, 16 rows
    paired = read_json(calm / "methods/coteaching_incv/training.json")
    assert paired["epochs"] > 5
    assert 100 <= paired["steps"] < 100 + paired["steps"] // paired["epochs"]
    assert paired["best"]["accuracy"] >= 0
    assert paired["warmup_epochs"] == math.floor(2 * paired["epochs"] / 5 + 0.5)
