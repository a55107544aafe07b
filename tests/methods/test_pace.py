"""When a training is compiled and replayed from CUDA graphs, and what stands in the way."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shards.errors import ConfigError
from trainer.methods.pace import Pace, pace_of
from trainer.recipe_file import load_recipe
from trainer.world import ALONE

RECIPES = Path(__file__).parents[2] / "recipes"
GPU = replace(ALONE, device=torch.device("cuda", 0))


def recipe(*overrides: str, name: str = "webvision50"):
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(20, Pace(False, False)), (400, Pace(True, False)), (26_000, Pace(True, True))],
)
def test_on_a_gpu_what_repays_itself_is_done(steps, expected):
    assert pace_of(recipe(), steps, GPU, by_launcher=False) == expected


@pytest.mark.parametrize("steps", [20, 26_000])
def test_a_cpu_runs_as_it_is_written(steps):
    assert pace_of(recipe(), steps, ALONE, by_launcher=False) == Pace(False, False)


def test_the_keys_have_the_last_word():
    assert pace_of(recipe("execution.graphs=false", "execution.compile=false"), 26_000, GPU, False) == Pace(
        False, False
    )
    assert pace_of(recipe("execution.graphs=true", "execution.compile=true"), 1, GPU, False) == Pace(True, True)


def test_exact_runs_are_not_compiled():
    assert pace_of(recipe("execution.deterministic=true"), 26_000, GPU, False) == Pace(True, False)


@pytest.mark.parametrize(
    ("override", "world", "said"),
    [("precision=fp16", GPU, "loss scale"), ("precision=bf16", ALONE, "no GPU")],
)
def test_what_cannot_be_recorded_runs_eagerly_or_is_refused(override, world, said):
    assert not pace_of(recipe(override), 26_000, world, False).graphs
    with pytest.raises(ConfigError, match=said):
        pace_of(recipe(override, "execution.graphs=true"), 26_000, world, False)


def test_deepspeed_is_not_recorded(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    world = replace(GPU, launcher="accelerate")
    assert not pace_of(recipe(), 26_000, world, by_launcher=True).graphs
    assert pace_of(recipe(), 26_000, world, by_launcher=False).graphs  # folds are not DeepSpeed's
