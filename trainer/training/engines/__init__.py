"""What drives a module through a step on one rank or many: forward, gradients, optimiser, moments; one interface."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from trainer.distributed.world import World
from trainer.training.engines.deepspeed import DeepSpeedEngine, deepspeed_stage
from trainer.training.engines.plain import PlainEngine, wrap_with_ddp


class Engine(Protocol):
    """A step is `zero_grad`, `forward` and `backward` for each part of the batch, then `step`.

    The caller all-reduces the `unreduced_gradients` before `step`.
    """

    module: nn.Module
    """Unwrapped, on the device: what is saved, and what predicts."""
    optimizer: torch.optim.Optimizer

    def forward(self, *inputs: torch.Tensor, last: bool = True) -> Any:
        """The forward whose gradients the ranks exchange; `last`: this is the last part of the batch."""
        ...

    def zero_grad(self) -> None: ...

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        """Add the gradients of one part's share of the global loss; after the last, they are those of all ranks."""
        ...

    def unreduced_gradients(self) -> tuple[torch.Tensor, ...]:
        """After the last backward: what the caller must all-reduce; empty where backward did it."""
        ...

    def clip(self, norm: float, networks: Sequence[nn.Module]) -> None:
        """Clip the gradient norm of each network separately."""
        ...

    def gradients_finite(self) -> torch.Tensor:
        """bool [], the same on every rank."""
        ...

    def set_rate(self, rate: float) -> None: ...

    def step(self, ok: torch.Tensor) -> None:
        """The optimiser's, where `ok` (bool [], the same on every rank) is true."""
        ...

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimiser's, whole, as `optimizer.<parameter>.<name>`; all ranks call it together."""
        ...

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def sync_weights(self) -> None:
        """After weights were loaded into the bare module."""
        ...


def make_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    exact: bool,
    allow_accelerate: bool,
    graphs: bool = False,
) -> Engine:
    """The engine for a module that is on the world's device.

    exact: a resumed run must equal the uninterrupted one bit for bit; allow_accelerate: accelerate, where it launched
    us, prepares the module (whole-world trainings only: it knows no groups); graphs: ranks communicate only at the
    step's sync points.
    """
    if graphs:
        return PlainEngine(module, optimizer, world, None)
    keeps_buckets = exact and world.size > 2  # of two numbers, either order has the same sum
    if allow_accelerate and world.launcher == "accelerate" and world.rank_group is not None:
        stage = deepspeed_stage(os.environ)
        if stage is not None:
            return DeepSpeedEngine(module, optimizer, world, stage)
        from trainer.training.engines.accelerated import (
            wrap_with_accelerate,  # here: accelerate takes seconds to import
        )

        return PlainEngine(module, optimizer, world, wrap_with_accelerate(module, world, find_unused=keeps_buckets))
    return PlainEngine(module, optimizer, world, wrap_with_ddp(module, world, find_unused=keeps_buckets))
