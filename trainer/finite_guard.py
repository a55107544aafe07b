"""Never step on a non-finite loss or gradient: NaN must not be read as "noisy label"."""

from typing import Protocol

import torch

from shards.errors import InputError

_MOST_IN_A_ROW = 10


class NonFiniteError(InputError):
    """Training has diverged."""


class Stepping(Protocol):
    """The part of an engine that the guard stands before."""

    def gradients_finite(self) -> torch.Tensor: ...

    def step(self, rate: float) -> None: ...


class FiniteGuard:
    """Steps where loss and gradients are finite, skips where not, gives up after ten skips in a row."""

    def __init__(self) -> None:
        self.skipped = 0
        self.in_a_row = 0

    def step(self, engine: Stepping, loss: torch.Tensor, rate: float, searching: bool = False) -> bool:
        """Whether the step was made. searching: a loss scale is still being lowered, which is no divergence."""
        if bool(engine.gradients_finite() & torch.isfinite(loss.detach())):
            engine.step(rate)
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 0 if searching else 1
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
