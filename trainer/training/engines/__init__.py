"""Engines run a module's forward, backward and optimiser step on one or more ranks, behind one interface."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from trainer.distributed.world import World
from trainer.training.engines.deepspeed import DeepSpeedEngine, deepspeed_stage
from trainer.training.engines.plain import PlainEngine, wrap_with_ddp


class Engine(Protocol):
    """Runs the steps of a module: `zero_grad`, `forward` and `backward` for each micro-batch, then `step`.

    The caller all-reduces the `unreduced_gradients` before `step`.
    """

    module: nn.Module
    """The unwrapped module on its device, used for saving and for prediction."""
    optimizer: torch.optim.Optimizer

    def forward(self, *inputs: torch.Tensor, last: bool = True) -> Any:
        """Run the forward of one micro-batch. last: whether it is the step's last micro-batch."""
        ...

    def zero_grad(self) -> None: ...

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        """Accumulate the gradients of one micro-batch.

        share: the micro-batch's share of the global loss. last: whether it is the step's last micro-batch; its
        backward sums the gradients over all ranks, except the `unreduced_gradients`.
        """
        ...

    def unreduced_gradients(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors the caller must all-reduce after the last backward; empty if backward has done so."""
        ...

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the summed gradients by `factor`, float [], the same on every rank."""
        ...

    def clip(self, norm: float, networks: Sequence[nn.Module]) -> None:
        """Clip the gradient norm of each network separately."""
        ...

    def gradients_finite(self) -> torch.Tensor:
        """Whether all gradients are finite: bool [], the same on every rank."""
        ...

    def set_rate(self, rate: float) -> None: ...

    def step(self, ok: torch.Tensor) -> None:
        """Take an optimiser step if `ok` (bool [], the same on every rank) is true."""
        ...

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the optimiser's full (unsharded) moments as `optimizer.<parameter>.<name>`.

        A collective: all ranks must call it.
        """
        ...

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def sync_weights(self) -> None:
        """Update the engine's own copy of the weights, if any, after weights were loaded into `module`."""
        ...


def make_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    exact: bool,
    allow_accelerate: bool,
    graphs: bool = False,
) -> Engine:
    """Create the engine for a module that is already on the world's device.

    exact: whether a resumed run must equal an uninterrupted one bit for bit. allow_accelerate: whether accelerate, if
    it is the launcher, wraps the module; only for training on the whole world, as accelerate does not support process
    subgroups. graphs: whether CUDA graphs restrict communication to the step's sync points.
    """
    if graphs:
        return PlainEngine(module, optimizer, world, None)
    keeps_buckets = exact and world.size > 2  # the sum of two numbers does not depend on their order
    if allow_accelerate and world.launcher == "accelerate" and world.rank_group is not None:
        stage = deepspeed_stage(os.environ)
        if stage is not None:
            return DeepSpeedEngine(module, optimizer, world, stage)
        from trainer.training.engines.accelerated import (
            wrap_with_accelerate,  # deferred: accelerate takes seconds to import
        )

        return PlainEngine(module, optimizer, world, wrap_with_accelerate(module, world, find_unused=keeps_buckets))
    return PlainEngine(module, optimizer, world, wrap_with_ddp(module, world, find_unused=keeps_buckets))
