"""`Task`: the training loop's interface to a training method."""

from collections.abc import Mapping
from typing import Protocol

import torch

from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds
from trainer.training.checkpoint import TrainState


class Task(Protocol):
    """The loop's interface to a training method: its networks, loss, optimiser and state."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        ...

    @property
    def chosen(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's sample_ids that each of two networks chose in the last step for their small loss; None if the
        method does not choose them so."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the training ends before its last epoch; changes in `end_epoch` only, alike on all ranks."""
        ...

    @property
    def epoch_metrics(self) -> Mapping[str, float]:
        """What the last `end_epoch` has measured."""
        ...

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        """Run one update, non-blocking; return scalars for the metrics, which the next step overwrites."""
        ...

    def require_finite(self, wait: bool = True) -> None:
        """Raise if training has diverged. wait: for the device; otherwise this may notice it in a later call."""
        ...

    def end_epoch(self, epoch: int) -> None: ...

    def close(self) -> None:
        """Release resources at the end of the training job."""
        ...

    def state(self) -> TrainState: ...

    def load(self, state: TrainState) -> None: ...
