"""Engine for a single process, for DistributedDataParallel, and for all-reduces at the step's sync points."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.flat_tensors import flatten, unflatten
from trainer.distributed.world import World
from trainer.training.optim import init_moments, load_moments, moments_state, set_learning_rate, step_if

# torch 2.14 renamed the option that lets each rank keep its own buffers.
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
OWN_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


def wrap_with_ddp(module: nn.Module, world: World, find_unused: bool) -> nn.Module:
    """Return the module wrapped in DDP; the module itself in a world of one.

    Each rank keeps its own buffers until the end of an epoch. find_unused: makes DDP keep its initial gradient
    buckets. Otherwise DDP rebuilds them after its first step, and with more than two ranks a resumed run would sum
    some gradients in a different order from an uninterrupted one.
    """
    if world.rank_group is None:
        return module
    options: dict[str, Any] = {OWN_BUFFERS: False, "find_unused_parameters": find_unused}
    return DistributedDataParallel(module, process_group=world.group, **options)


class PlainEngine:
    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, world: World, exchanging: nn.Module | None
    ) -> None:
        """exchanging: the module, wrapped so that the ranks average their gradients. None: the caller all-reduces the
        `unreduced_gradients` itself, between two CUDA graphs."""
        self.module, self.optimizer = module, optimizer
        self._exchanging = module if exchanging is None else exchanging
        has_company = world.rank_group is not None
        self._ranks = world.size if has_company and exchanging is not None else 1
        self._flat = None
        if has_company and exchanging is None:
            _broadcast_weights(module, world)
            self._flat = _FlatGradients(module)
        init_moments(optimizer)

    def forward(self, *inputs: torch.Tensor, last: bool = True) -> Any:
        if isinstance(self._exchanging, DistributedDataParallel):
            self._exchanging.require_backward_grad_sync = last  # the flag behind DDP's no_sync()
        return self._exchanging(*inputs)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        (share * self._ranks).backward()  # DDP averages over ranks, but shares must be summed

    def unreduced_gradients(self) -> tuple[torch.Tensor, ...]:
        return () if self._flat is None else (self._flat.fill(),)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        torch._foreach_mul_([p.grad for p in self.module.parameters() if p.grad is not None], factor)

    def clip(self, norm: float, networks: Sequence[nn.Module]) -> None:
        for network in networks:
            torch.nn.utils.clip_grad_norm_(network.parameters(), norm)

    def gradients_finite(self) -> torch.Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return torch.isfinite(torch.nn.utils.get_total_norm(gradients))

    def set_rate(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)

    def step(self, ok: torch.Tensor) -> None:
        step_if(self.optimizer, ok)

    def moments(self) -> dict[str, torch.Tensor]:
        return moments_state(self.optimizer)

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        load_moments(self.optimizer, tensors)

    def sync_weights(self) -> None:
        """Nothing to do: this engine trains the module's weights directly and keeps no copy."""


def _broadcast_weights(module: nn.Module, world: World) -> None:
    """Broadcast rank 0's weights, as DDP does: different machine types may draw different bits from the same seed."""
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    with torch.no_grad():
        whole = flatten(tensors)
        if not world.is_rank0:
            whole.zero_()
        torch._foreach_copy_(tensors, unflatten(world.all_reduce(whole), tensors))


class _FlatGradients:
    """All gradients of a module in one flat tensor, so that a single all-reduce suffices."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        first = self._parameters[0]
        numbers = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.zeros(sum(numbers), dtype=first.dtype, device=first.device)
        # Each view has the strides of its weight, so that one foreach call can copy all gradients.
        self._views = [
            part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
            for part, parameter in zip(self._flat.split(numbers), self._parameters, strict=True)
        ]

    def fill(self) -> torch.Tensor:
        """Copy all gradients into the flat tensor and return it; each parameter's `grad` becomes a view of it."""
        missing = [view for p, view in zip(self._parameters, self._views, strict=True) if p.grad is None]
        if missing:
            torch._foreach_zero_(missing)
        there = [(p, p.grad, v) for p, v in zip(self._parameters, self._views, strict=True) if p.grad is not None]
        torch._foreach_copy_([view for _, _, view in there], [gradient for _, gradient, _ in there])
        for parameter, _, view in there:
            parameter.grad = view
        return self._flat
