"""What all methods share: a module, its optimiser at the schedule's rate, mixed precision, the finite guard."""

from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainer.checkpoint import TrainState, load_module, load_optimizer, module_state, optimizer_state
from trainer.config import OptimizerConfig
from trainer.finite_guard import FiniteGuard
from trainer.methods.micro_batches import micro_batches
from trainer.optimisation import learning_rate_at, make_optimizer, set_learning_rate

Precision = Literal["fp32", "bf16"]


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def image_type(precision: Precision) -> torch.dtype:
    """What images are loaded as: the type in which autocast would give them to the first layer anyway."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row, always in fp32: float32 [rows]."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


class OptimisedModule:
    """A module under training; methods add what a step computes.

    A step is `begin_step`, then forward and `backward` for each part of the batch, then `apply`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig,
        steps_per_epoch: int,
        device: torch.device,
        precision: Precision = "fp32",
        micro: int | None = None,
    ) -> None:
        """micro: most rows of a forward with gradient; None: all rows of the batch."""
        self.module = module.to(device)
        self.device, self.precision = device, precision
        self._micro = micro
        self._schedule, self._steps_per_epoch = optimizer, steps_per_epoch
        self._optimizer = make_optimizer(
            self.module,
            optimizer.kind,
            optimizer.weight_decay,
            optimizer.momentum,
            optimizer.decay_scope,
            optimizer.learning_rate,
        )
        self._guard = FiniteGuard()
        self._buffers = [b for b in self.module.buffers() if b.is_floating_point()]
        self._buffers_before = [b.clone() for b in self._buffers]
        self.learning_rate = optimizer.learning_rate

    def parts(self, rows: int) -> list[slice]:
        return micro_batches(rows, self._micro)

    def begin_step(self) -> None:
        """Before the forward: BatchNorm learns in it, and must forget a batch that is not finite."""
        if self._buffers:
            torch._foreach_copy_(self._buffers_before, self._buffers)
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, share: torch.Tensor) -> None:
        """Add the gradients of one part's share of the loss to those of the parts before it."""
        share.backward()

    def apply(self, loss: torch.Tensor, step: int) -> None:
        """One optimiser step at the schedule's rate, unless the whole loss or a gradient is not finite."""
        schedule = self._schedule
        self.learning_rate = learning_rate_at(
            step, self._steps_per_epoch, schedule.learning_rate, schedule.milestones, schedule.warmup_epochs
        )
        set_learning_rate(self._optimizer, self.learning_rate)
        if not self._guard.step(self._optimizer, loss, self.module.parameters()) and self._buffers:
            torch._foreach_copy_(self._buffers, self._buffers_before)

    def end_epoch(self, epoch: int) -> None:
        """Nothing to do, for most methods."""

    def state(self) -> TrainState:
        tensors = module_state(self.module, "model.") | optimizer_state(self._optimizer)
        return TrainState(tensors, {"guard": self._guard.state()})

    def load(self, state: TrainState) -> None:
        load_module(self.module, state.tensors, "model.")
        load_optimizer(self._optimizer, state.tensors)
        self._guard.load(state.values["guard"])
