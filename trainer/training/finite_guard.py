"""Never step on a non-finite loss or gradient: NaN must not be read as "noisy label"."""

import torch

from shards.errors import InputError

_MOST_IN_A_ROW = 10


class NonFiniteError(InputError):
    """Training has diverged."""


class FiniteGuard:
    """Counts steps that were skipped because a number was not finite; ten in a row are an error.

    It counts on the device, with no host-device sync except in `require_finite`.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        """Steps skipped in all, skipped in a row up to now, and most skipped in a row."""

    def note(self, finite: torch.Tensor, counted: torch.Tensor | bool = True, searching: bool = False) -> None:
        """finite: bool [], of this step; counted: whether the step counts at all; searching: the loss scale is still
        being lowered, which is not divergence."""
        skipped, in_a_row, most = self._counts.unbind()
        bad = (~finite & counted).long()
        now = torch.where(finite & counted, 0, in_a_row + (0 if searching else bad))
        self._counts.copy_(torch.stack([skipped + bad, now, torch.maximum(most, now)]))

    def require_finite(self) -> None:
        """Raise after ten in a row; syncs with the device."""
        most = int(self._counts[2])
        if most >= _MOST_IN_A_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite in {most} steps in a row: training has "
                "diverged. Lower optimizer.learning_rate (or lengthen optimizer.warmup_epochs) and redo the stage"
            )

    def state(self) -> dict[str, int]:
        skipped, in_a_row, _ = self._counts.tolist()
        return {"skipped": skipped, "in_a_row": in_a_row}

    def load(self, state: dict[str, int]) -> None:
        counts = [state["skipped"], state["in_a_row"], state["in_a_row"]]
        self._counts.copy_(torch.tensor(counts, dtype=torch.int64))
