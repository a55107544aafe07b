"""When a training is compiled and replayed from CUDA graphs, and what prevents it."""

from dataclasses import replace

import pytest
import torch

from shards.errors import ConfigError
from tests.support import RECIPES
from trainer.acceleration.policy import Acceleration, choose_acceleration
from trainer.distributed.world import SINGLE_PROCESS
from trainer.run.recipe import load_recipe

GPU = replace(SINGLE_PROCESS, device=torch.device("cuda", 0))


def recipe(*overrides: str, name: str = "webvision50"):
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(20, Acceleration(False, False)), (400, Acceleration(True, False)), (26_000, Acceleration(True, True))],
)
def test_on_a_gpu_what_repays_itself_is_done(steps, expected):
    assert choose_acceleration(recipe(), steps, GPU, allow_accelerate=False) == expected


@pytest.mark.parametrize("steps", [20, 26_000])
def test_a_cpu_runs_as_it_is_written(steps):
    assert choose_acceleration(recipe(), steps, SINGLE_PROCESS, allow_accelerate=False) == Acceleration(False, False)


def test_the_keys_have_the_last_word():
    assert choose_acceleration(
        recipe("execution.graphs=false", "execution.compile=false"), 26_000, GPU, False
    ) == Acceleration(False, False)
    assert choose_acceleration(
        recipe("execution.graphs=true", "execution.compile=true"), 1, GPU, False
    ) == Acceleration(True, True)


def test_exact_runs_are_not_compiled():
    assert choose_acceleration(recipe("execution.deterministic=true"), 26_000, GPU, False) == Acceleration(
        True, False
    )


@pytest.mark.parametrize(
    ("override", "world", "said"),
    [("precision=fp16", GPU, "loss scaling"), ("precision=bf16", SINGLE_PROCESS, "no GPU")],
)
def test_what_cannot_be_recorded_runs_eagerly_or_is_refused(override, world, said):
    assert not choose_acceleration(recipe(override), 26_000, world, False).graphs
    with pytest.raises(ConfigError, match=said):
        choose_acceleration(recipe(override, "execution.graphs=true"), 26_000, world, False)


def test_deepspeed_is_not_recorded(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    world = replace(GPU, launcher="accelerate")
    assert not choose_acceleration(recipe(), 26_000, world, allow_accelerate=True).graphs
    assert choose_acceleration(recipe(), 26_000, world, allow_accelerate=False).graphs  # folds are not DeepSpeed's
