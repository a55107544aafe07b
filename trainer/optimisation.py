"""Learning rates as a pure function of the step, and the paper's two optimisers."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from trainer.models import DecayScope, weight_decay_groups

OptimizerKind = Literal["adam", "sgd"]


def learning_rate_at(
    step: int,
    steps_per_epoch: int,
    base: float,
    milestones: Sequence[tuple[int, float]],
    warmup_epochs: float = 0.0,
) -> float:
    """Learning rate of the optimiser step number `step`, counted from 0.

    A milestone (epoch, rate) holds from step epoch * steps_per_epoch on; its rate is absolute, not a factor.
    A warm-up of w steps climbs linearly: step s < w runs at (s+1)/w of the rate it would have without.
    """
    if step < 0 or steps_per_epoch < 1:
        raise ValueError(f"step {step} of {steps_per_epoch} steps an epoch: need step >= 0 and at least 1 step")
    rate = base
    for epoch, milestone_rate in sorted(milestones):
        if step >= epoch * steps_per_epoch:
            rate = milestone_rate
    warmup_steps = round(warmup_epochs * steps_per_epoch)
    return rate * (step + 1) / warmup_steps if step < warmup_steps else rate


def make_optimizer(
    model: nn.Module,
    kind: OptimizerKind,
    weight_decay: float,
    momentum: float = 0.9,
    decay_scope: DecayScope = "all",
    lr: float = 1e-3,
) -> torch.optim.Optimizer:
    """Adam or SGD with momentum; in both, weight decay is an L2 term in the gradient, g + weight_decay * w.

    So never AdamW: the paper's l2 regulariser passes through Adam's moments. `momentum` is SGD's alone.
    `lr` is the rate until the first `set_learning_rate`.
    """
    groups = weight_decay_groups(model, weight_decay, decay_scope)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=lr)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    raise ValueError(f"unknown optimiser {kind!r}; choose 'adam' or 'sgd'")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the rate `lr`; in place if a tensor, as a CUDA graph has captured it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
