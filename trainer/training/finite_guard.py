"""Count steps skipped for a non-finite loss or gradient: NaN must not be mistaken for a noisy label."""

import torch

from shards.errors import InputError
from trainer.loading.transfer import HostCopy

_MOST_IN_A_ROW = 10


class NonFiniteError(InputError):
    """Raised when training has diverged."""


class FiniteGuard:
    """Counts steps skipped because the loss or a gradient was not finite; ten in a row are an error.

    Counts on the device; only `require_finite`, unless it need not wait, and `state` sync with the host.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        """Total skipped steps, current streak of skipped steps, longest streak."""
        self._copied: HostCopy | None = None

    def note(
        self, finite: torch.Tensor, counted: torch.Tensor | bool = True, searching: torch.Tensor | None = None
    ) -> None:
        """Record one step.

        finite: bool [], whether its loss and gradients are finite. counted: False for a warm-up step or one without
        rows. searching: bool [], whether fp16 is still lowering its loss scale, so that a non-finite gradient
        does not mean divergence.
        """
        skipped, in_a_row, most = self._counts.unbind()
        bad = (~finite & counted).long()
        diverged = bad if searching is None else torch.where(searching, 0, bad)
        now = torch.where(finite & counted, 0, in_a_row + diverged)
        self._counts.copy_(torch.stack([skipped + bad, now, torch.maximum(most, now)]))

    def require_finite(self, wait: bool = True) -> None:
        """Raise NonFiniteError after ten skipped steps in a row.

        wait: for the device. Otherwise this sees the steps up to an earlier call, whose counts have arrived.
        """
        if self._copied is None or wait:
            self._copied = HostCopy(self._counts)
        if not wait and not self._copied.is_ready:
            return
        most = int(self._copied.get()[2])
        self._copied = None
        if most >= _MOST_IN_A_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite in {most} steps in a row: training has diverged. Lower "
                "optimizer.learning_rate (or increase optimizer.warmup_epochs) and restart the stage with --redo"
            )

    def state(self) -> dict[str, int]:
        skipped, in_a_row, _ = self._counts.tolist()
        return {"skipped": skipped, "in_a_row": in_a_row}

    def load(self, state: dict[str, int]) -> None:
        counts = [state["skipped"], state["in_a_row"], state["in_a_row"]]
        self._counts.copy_(torch.tensor(counts, dtype=torch.int64))
