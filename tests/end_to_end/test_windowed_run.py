"""A whole run in the windowed order: all its trainings follow the recipe's key."""

import json
from pathlib import Path

import pytest

from shards.pack import PackOptions, pack
from shards.sources import open_source
from tests.support import RECIPES
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

TINY = RECIPES / "tiny.yaml"
BRIEF = ["execution.threads=1", "incv.rounds=1", "incv.epochs=1", "standard.epochs=1", "coteaching.epochs=1"]
BRIEF += ["coteaching_incv.warmup_epochs=0", "execution.log_every=1"]
TRAININGS = ["rounds/0/fold0", "rounds/0/fold1", "methods/standard", "methods/coteaching", "methods/coteaching_incv"]


@pytest.fixture
def digits_in_many_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        pack(
            open_source("digits", None, split),
            tmp_path / "data" / "shards" / f"digits-{split}",
            PackOptions(samples_per_shard=50),
        )


def losses(run: Path) -> dict[str, list[float]]:
    """The loss of every step of every training."""
    return {
        name: [json.loads(line)["loss"] for line in (run / name / "metrics.jsonl").read_text().splitlines()]
        for name in TRAININGS
    }


def test_every_training_follows_the_order_of_the_recipe(digits_in_many_shards, tmp_path):
    found = {}
    for name, order in {
        "shuffled": "{kind: shuffled}",
        "windowed": "{kind: windowed, window: 2}",
        "all_in_one_window": "{kind: windowed, window: 1000}",
    }.items():
        recipe = load_recipe(TINY, [*BRIEF, f"order={order}"])
        assert run_recipe(recipe, "tiny", tmp_path / name) == 0
        found[name] = losses(tmp_path / name)
    for training in TRAININGS:
        assert found["shuffled"][training] != found["windowed"][training], training
        assert len(found["shuffled"][training]) == pytest.approx(len(found["windowed"][training]), abs=3)
    assert found["shuffled"] == found["all_in_one_window"]
