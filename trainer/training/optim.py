"""The learning rate as a pure function of the step, and the optimisers."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from trainer.config.optimisation import OptimizerConfig
from trainer.models.factory import DecayScope, weight_decay_groups

OptimizerKind = Literal["adam", "adamw", "sgd"]


def learning_rate_at(
    step: int,
    steps_per_epoch: int,
    base: float,
    milestones: Sequence[tuple[int, float]],
    warmup_epochs: float = 0.0,
) -> float:
    """Return the learning rate of optimiser step `step`, counted from 0.

    A milestone (epoch, rate) applies from step epoch * steps_per_epoch on; its rate is absolute, not a factor.
    A warm-up of w steps is linear: step s < w uses (s+1)/w of the rate it would otherwise have.
    """
    if step < 0 or steps_per_epoch < 1:
        raise ValueError(
            f"step is {step} (must be at least 0) and steps_per_epoch is {steps_per_epoch} (must be at least 1)"
        )
    rate = base
    for epoch, milestone_rate in sorted(milestones):
        if step >= epoch * steps_per_epoch:
            rate = milestone_rate
    warmup_steps = round(warmup_epochs * steps_per_epoch)
    return rate * (step + 1) / warmup_steps if step < warmup_steps else rate


def cosine_rate_at(step: int, total_steps: int, base: float, warmup_steps: int = 0) -> float:
    """Return the learning rate of optimiser step `step`: a linear warm-up, then half a cosine that would reach 0 at
    `total_steps`, one step after the last."""
    if not 0 <= step < total_steps or warmup_steps >= total_steps:
        raise ValueError(
            f"step is {step} and the warm-up has {warmup_steps} steps, but the training has {total_steps} steps"
        )
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    return base * (1 + math.cos(math.pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2


def scheduled_rate(step: int, steps_per_epoch: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of optimiser step `step` by the recipe's schedule."""
    if optimizer.schedule == "cosine":
        warmup = round(optimizer.warmup_epochs * steps_per_epoch)
        return cosine_rate_at(step, total_steps, optimizer.learning_rate, min(warmup, total_steps - 1))
    return learning_rate_at(
        step, steps_per_epoch, optimizer.learning_rate, optimizer.milestones, optimizer.warmup_epochs
    )


def make_optimizer(
    model: nn.Module,
    kind: OptimizerKind,
    weight_decay: float,
    momentum: float = 0.9,
    decay_scope: DecayScope = "all",
    lr: float = 1e-3,
) -> torch.optim.Optimizer:
    """Create Adam, AdamW or SGD with momentum, which is the only one that reads `momentum`.

    In Adam and SGD, weight decay is an L2 term in the gradient, g + weight_decay * w, which passes through Adam's
    moments as the paper's regulariser does. In AdamW it is decoupled: w shrinks by lr * weight_decay * w.
    `lr` is the rate until the first `set_learning_rate`; on a GPU it is a device tensor that a CUDA graph can read.
    """
    groups = weight_decay_groups(model, weight_decay, decay_scope)
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    rate = torch.tensor(lr, device=device) if on_gpu else lr
    # Fused optimisers update many weights in one kernel, and only they can skip a step with no host-device sync. They
    # are not used on a CPU, where their result depends on a weight's position in memory, which differs under ZeRO.
    if kind == "adam":
        return torch.optim.Adam(groups, lr=rate, fused=on_gpu, capturable=on_gpu)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=rate, fused=on_gpu, capturable=on_gpu)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, fused=on_gpu)
    raise ValueError(f"unknown optimiser {kind!r}; choose 'adam', 'adamw' or 'sgd'")


def step_if(optimizer: torch.optim.Optimizer, ok: torch.Tensor) -> None:
    """Take an optimiser step if `ok` (bool []) is true; otherwise leave weights and moments bitwise unchanged."""
    if optimizer.defaults["fused"]:
        # These are the attributes through which torch's GradScaler controls fused optimisers.
        optimizer.grad_scale, optimizer.found_inf = None, (~ok).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(ok):
        optimizer.step()


def init_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create zero moments before the first step, because capturing a CUDA graph needs their addresses."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state:
                continue
            if isinstance(optimizer, torch.optim.Adam):  # or AdamW, its subclass
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            elif group["momentum"] != 0:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every parameter group; a tensor is filled in place, because CUDA graphs refer to it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def moments_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimiser's moments as `optimizer.<parameter>.<name>`; rates are not saved."""
    return {
        f"optimizer.{parameter}.{name}": torch.as_tensor(value)
        for parameter, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
        if value is not None
    }


def load_moments(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Load moments in place; those missing from `tensors` (saved before the first step) become zero."""
    if not optimizer.state:
        init_moments(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, moment in optimizer.state[parameter].items():
            saved = tensors.get(f"optimizer.{number}.{name}")
            moment.zero_() if saved is None else moment.copy_(saved)
