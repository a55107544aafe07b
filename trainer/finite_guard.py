"""Never step on a non-finite loss or gradient: NaN must not be read as "noisy label"."""

from collections.abc import Iterable

import torch

from shards.errors import InputError

_MOST_IN_A_ROW = 10


class NonFiniteError(InputError):
    """Training has diverged."""


class FiniteGuard:
    """Steps the optimiser where loss and gradients are finite, skips where not, gives up after ten skips."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def step(
        self, optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]
    ) -> bool:
        """Whether the step was made."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        size = torch.nn.utils.get_total_norm(gradients) + loss.detach()
        if bool(torch.isfinite(size)):
            optimizer.step()
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row >= _MOST_IN_A_ROW:
            raise NonFiniteError(
                f"the loss or its gradient was not finite in {self.in_a_row} steps in a row: training has "
                "diverged. Lower optimizer.learning_rate (or lengthen optimizer.warmup_epochs) and redo the stage"
            )
        return False

    def state(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: dict[str, int]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
