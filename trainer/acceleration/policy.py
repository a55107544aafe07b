"""Decide whether a training job uses torch.compile and CUDA graphs."""

import os
from dataclasses import dataclass

from shards.errors import ConfigError
from trainer.config.schema import ExecutionConfig, Recipe
from trainer.distributed.world import World
from trainer.training.engines.deepspeed import deepspeed_stage

_WORTH_CAPTURE = 50
"""Minimum number of steps for CUDA graphs: a capture takes as long as a few eager steps."""
_WORTH_COMPILING = 5000
"""Minimum number of steps for torch.compile: the first compilation takes one to two minutes, and saves 15 ms per
step of Inception-ResNet-v2."""


@dataclass(frozen=True)
class Acceleration:
    graphs: bool
    compile: bool


def check_acceleration(recipe: Recipe, world: World) -> None:
    """Raise ConfigError if the execution keys require CUDA graphs that cannot work in this world."""
    choose_acceleration(recipe, 0, world, allow_accelerate=bool(recipe.methods))


def choose_acceleration(recipe: Recipe, steps: int, world: World, allow_accelerate: bool) -> Acceleration:
    """Decide on CUDA graphs and compilation for a training job of `steps` steps.

    allow_accelerate: whether accelerate may wrap the module.
    """
    keys = recipe.execution
    obstacle = _find_graph_obstacle(recipe, world, allow_accelerate)
    if keys.graphs is True and obstacle is not None:
        raise ConfigError(f"execution.graphs is true, but {obstacle}: set it to auto or false")
    graphs = keys.graphs is True or (keys.graphs == "auto" and obstacle is None and steps >= _WORTH_CAPTURE)
    return Acceleration(graphs, should_compile(keys, steps, on_gpu=world.device.type == "cuda"))


def should_compile(keys: ExecutionConfig, steps: int, on_gpu: bool = True) -> bool:
    """Whether to compile the networks of a training job of `steps` steps."""
    if keys.compile == "auto":
        return on_gpu and not keys.deterministic and steps >= _WORTH_COMPILING
    return keys.compile


def _find_graph_obstacle(recipe: Recipe, world: World, allow_accelerate: bool) -> str | None:
    if world.device.type != "cuda":
        return "there is no GPU to capture CUDA graphs on"
    if recipe.precision == "fp16":
        return "fp16 loss scaling syncs with the host in every step (bf16 needs no loss scaling)"
    if recipe.model.sync_batchnorm and world.rank_group is not None:
        return "SyncBatchNorm communicates between ranks inside the network"
    if allow_accelerate and world.launcher == "accelerate" and deepspeed_stage(os.environ) is not None:
        return "DeepSpeed syncs with the host in every step"
    return None
