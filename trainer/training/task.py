"""`Task`: the training loop's interface to a training method."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import EpochPlan, Schedule, StepIds
from trainer.training.checkpoint import TrainState


class Task(Protocol):
    """The loop's interface to a training method: its networks, loss, optimiser and state."""

    @property
    def schedule(self) -> Schedule: ...

    @property
    def plans_ahead(self) -> bool:
        """Whether `plan_epoch` is a pure function of (stream, epoch), and may be asked ahead of the training."""
        ...

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
        """Whether the training ends before its last epoch; changes in `after_epoch` only, alike on all ranks."""
        ...

    @property
    def epoch_metrics(self) -> Mapping[str, float]:
        """What was measured after the last epoch, and before the next."""
        ...

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        """Run one update, non-blocking; return scalars for the metrics, which the next step overwrites."""
        ...

    def require_finite(self, wait: bool = True) -> None:
        """Raise if training has diverged. wait: for the device; otherwise this may notice it in a later call."""
        ...

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return what the epoch's steps show: the same on all ranks, and after a resume in mid-epoch."""
        ...

    def prepare_epoch(self, epoch: int) -> None:
        """Change what the plan and the steps of this epoch read; once for each epoch, after the epoch before."""
        ...

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        """Return what to do at the end of an epoch, in order; each is done once, unless a stop interrupts it."""
        ...

    def close(self) -> None:
        """Release resources at the end of the training job."""
        ...

    def state(self) -> TrainState: ...

    def load(self, state: TrainState) -> None: ...
