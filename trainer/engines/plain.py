"""One process, or DistributedDataParallel over a world or a fold's group."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoint import load_optimizer, optimizer_state
from trainer.optimisation import set_learning_rate
from trainer.world import World

# The option that lets each rank keep buffers of its own was renamed in torch 2.14.
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
OWN_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


def distributed(module: nn.Module, world: World, find_unused: bool) -> nn.Module:
    """The module with its gradient exchange; itself where there is nobody to exchange with.

    Buffers are each rank's own until the end of an epoch. find_unused: DDP then keeps its first division into
    buckets. Otherwise it divides anew after its first step, so a resumed run would add some numbers up in another
    order than the undisturbed one did, where there are more than two ranks.
    """
    if world.ties is None:
        return module
    options: dict[str, Any] = {OWN_BUFFERS: False, "find_unused_parameters": find_unused}
    return DistributedDataParallel(module, process_group=world.group, **options)


class PlainEngine:
    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, world: World, exchanging: nn.Module
    ) -> None:
        """exchanging: the module, wrapped so that ranks average their gradients."""
        self.module, self.optimizer = module, optimizer
        self._exchanging = exchanging
        self._ranks = world.size if world.ties is not None else 1

    def forward(self, *inputs: torch.Tensor, last: bool = True) -> Any:
        if isinstance(self._exchanging, DistributedDataParallel):
            self._exchanging.require_backward_grad_sync = last  # what its no_sync() sets, for forward and backward
        return self._exchanging(*inputs)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        (share * self._ranks).backward()  # DDP averages over ranks, and a share is one of a sum

    def clip(self, norm: float, networks: Sequence[nn.Module]) -> None:
        for network in networks:
            torch.nn.utils.clip_grad_norm_(network.parameters(), norm)

    def gradients_finite(self) -> torch.Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        return torch.isfinite(torch.nn.utils.get_total_norm(gradients))

    def step(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    def moments(self) -> dict[str, torch.Tensor]:
        return optimizer_state(self.optimizer)

    def load_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        load_optimizer(self.optimizer, tensors)

    def weights_changed(self) -> None:
        """The bare module's weights are the ones that are trained."""
