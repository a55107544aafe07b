"""What a network has besides its weights: BatchNorm's statistics, saved with it and taken back after a bad step."""

from collections.abc import Sequence

import torch
from torch import nn

from shards.errors import DataError
from trainer.distributed.flat_tensors import flatten, unflatten, unflatten_bytes


def batchnorm_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a step may change, by name: a checkpoint has them in this order, whatever that of the code.

    Those that a network does not save are tables that it makes for itself.
    """
    saved = module.state_dict().keys()
    return {name: b for name, b in sorted(module.named_buffers()) if b.is_floating_point() and name in saved}


def load_statistics(live: Sequence[torch.Tensor], saved: torch.Tensor) -> None:
    """saved: their `flat_bytes`."""
    expected = sum(buffer.nbytes for buffer in live)
    if saved.numel() != expected:
        raise DataError(
            f"the checkpoint has {saved.numel()} bytes of BatchNorm's statistics for each rank, and this network "
            f"{expected}: it was written by another one. Put the right checkpoint back, or begin the stage again "
            "with --redo"
        )
    torch._foreach_copy_(list(live), unflatten_bytes(saved.to(live[0].device), live))


class BufferSnapshot:
    """The buffers of a module (BatchNorm's statistics) as they were before a step, should it be left out."""

    def __init__(self, module: nn.Module) -> None:
        every = list(module.buffers())
        kinds = [[b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]]
        self._kinds = [kind for kind in kinds if kind]
        self._before: list[torch.Tensor] = []

    def keep(self) -> None:
        self._before = [flatten(kind) for kind in self._kinds]

    def restore_unless(self, ok: torch.Tensor) -> None:
        """Go back to what `keep` saw, where `ok` (bool []) is false. All buffers at once: there are hundreds."""
        for kind, before in zip(self._kinds, self._before, strict=True):
            torch._foreach_copy_(kind, unflatten(torch.where(ok, flatten(kind), before), kind))
