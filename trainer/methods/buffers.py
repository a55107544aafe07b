"""Save and load BatchNorm statistics, and roll them back after a skipped step."""

from collections.abc import Sequence

import torch
from torch import nn

from shards.errors import DataError
from trainer.distributed.flat_tensors import flatten, unflatten, unflatten_bytes


def batchnorm_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a step may change, sorted by name so that registration order does not matter.

    Non-persistent buffers are excluded: they are constant tables, computed when the network is built.
    """
    saved = module.state_dict().keys()
    return {name: b for name, b in sorted(module.named_buffers()) if b.is_floating_point() and name in saved}


def load_statistics(live: Sequence[torch.Tensor], saved: torch.Tensor) -> None:
    """Copy saved statistics into the live buffers. saved: `flatten_bytes` of the same buffers."""
    expected = sum(buffer.nbytes for buffer in live)
    if saved.numel() != expected:
        raise DataError(
            f"the checkpoint has {saved.numel()} bytes of BatchNorm statistics per rank, but this network has "
            f"{expected}: the checkpoint belongs to another network. Restore the right checkpoint, or restart the "
            "stage with --redo"
        )
    torch._foreach_copy_(list(live), unflatten_bytes(saved.to(live[0].device), live))


class BufferSnapshot:
    """A snapshot of a module's buffers (BatchNorm statistics) before a step, restored if the step is skipped."""

    def __init__(self, module: nn.Module) -> None:
        every = list(module.buffers())
        kinds = [[b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]]
        self._kinds = [kind for kind in kinds if kind]
        self._before: list[torch.Tensor] = []

    def keep(self) -> None:
        self._before = [flatten(kind) for kind in self._kinds]

    def restore_unless(self, ok: torch.Tensor) -> None:
        """Restore the snapshot if `ok` (bool []) is false; one fused operation handles the hundreds of buffers."""
        for kind, before in zip(self._kinds, self._before, strict=True):
            torch._foreach_copy_(kind, unflatten(torch.where(ok, flatten(kind), before), kind))
