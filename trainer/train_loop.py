"""The one loop: fetch, task step, log, checkpoint, stop."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shards.errors import DataError
from shards.progress import Progress
from trainer.checkpoint import Checkpointer, TrainState, load_random_state, newest_checkpoint, random_state
from trainer.config import ExecutionConfig
from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds, TrainingPlan
from trainer.manifest import Manifest
from trainer.metrics_log import MetricsLog
from trainer.stop_request import Stopped, StopRequest
from trainer.world import World

_SHARE_AT_STAKE = 5  # a checkpoint at least every fifth of a training


class Task(Protocol):
    """A training method: networks, loss, optimiser and state; the loop only calls it."""

    learning_rate: float
    """That of the last step."""

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        """One update; returns scalars to be averaged into the metrics."""
        ...

    def end_epoch(self, epoch: int) -> None: ...

    def state(self) -> TrainState: ...

    def load(self, state: TrainState) -> None: ...


@dataclass(frozen=True)
class Training:
    """Where a training stands in the run: its name, its stage, its folder."""

    stage: str
    folder: Path
    round: int | None = None
    fold: int | None = None

    @property
    def name(self) -> str:
        return self.stage if self.round is None else f"{self.stage}/{self.round}/{self.fold}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Surroundings:
    """What every loop of a start shares."""

    world: World
    execution: ExecutionConfig
    manifest: Manifest
    stop: StopRequest


def checkpoint_interval(total_steps: int, checkpoint_every: int) -> int:
    return min(checkpoint_every, max(1, total_steps // _SHARE_AT_STAKE))


def train(
    training: Training,
    task: Task,
    plan: TrainingPlan,
    batches_from: Callable[[int], Iterator[Batch]],
    around: Surroundings,
) -> None:
    """Run `task` over the plan from its newest checkpoint, or from the start, to the end."""
    keeper = _Keeper(training, task, plan, around)
    counter = around.manifest.counter(training.name)
    interval = checkpoint_interval(plan.total_steps, around.execution.checkpoint_every)
    try:
        first = keeper.begin()
        with Progress(training.name, plan.total_steps, first, "steps") as progress:
            for at, batch in zip(plan.steps(first), batches_from(first), strict=True):
                keeper.metrics.add(task.step(batch, at))
                counter.add()
                done = at.step + 1
                finished = done == plan.total_steps
                # The first step too: from then on a run without a checkpoint is known to have lost something.
                due = done == 1 or finished or done % around.execution.log_every == 0
                note = keeper.log(done) if due else ""
                progress.advance(1, note)
                if done % plan.steps_per_epoch == 0:
                    keeper.end_epoch(done)
                reason = around.stop.reason()
                if reason is not None and not finished:
                    keeper.save(done, wait=True)
                    raise Stopped(training.name, done, reason)
                if finished or done % interval == 0:
                    keeper.save(done)
        keeper.wait()
    finally:
        counter.close()
        keeper.close()


class _Keeper:
    """What a training leaves behind and comes back to: checkpoints and metrics."""

    def __init__(self, training: Training, task: Task, plan: TrainingPlan, around: Surroundings) -> None:
        self._training, self._task, self._plan, self._around = training, task, plan, around
        self._checkpoints = Checkpointer(training.checkpoints)
        self.metrics = MetricsLog(training.folder / "metrics.jsonl")

    def begin(self) -> int:
        """Load the newest checkpoint, or make the one of step 0; returns the step to go on with."""
        found = newest_checkpoint(self._training.checkpoints)
        if found is None:
            self._refuse_to_start_over()
            self.save(0, wait=True)
            return 0
        step, state = found
        self._task.load(state)
        load_random_state(state.tensors, self._around.world.device)
        self.metrics.load(state.values["metrics"], self._around.world.device)
        self.metrics.cut_back(step)
        if 0 < step < self._plan.total_steps:
            print(f"{self._training.name}: going on from step {step}", file=sys.stderr)
        self._around.manifest.resumed(self._training.stage, self._training.round, self._training.fold, step)
        if not state.values["epoch_ended"]:
            self.end_epoch(step)
        return step

    def _refuse_to_start_over(self) -> None:
        if self.metrics.has_lines():
            folder, checkpoints = self._training.folder, self._training.checkpoints
            raise DataError(
                f"{self._training.name} has logged progress in {folder / 'metrics.jsonl'}, but {checkpoints} holds "
                "no readable checkpoint: its progress is lost. Put the checkpoints back, or begin the stage again "
                f"with `--redo {self._training.stage}`"
            )

    def log(self, done: int) -> str:
        epoch = round(done / self._plan.steps_per_epoch, 3)
        return self.metrics.write(step=done, epoch=epoch, learning_rate=self._task.learning_rate)

    def end_epoch(self, done: int) -> None:
        """A stop in here keeps the epoch's steps; the next start ends the epoch first."""
        try:
            self._task.end_epoch(done // self._plan.steps_per_epoch - 1)
        except Stopped as stopped:
            self.save(done, wait=True, epoch_ended=False)
            raise Stopped(self._training.name, done, stopped.reason) from None

    def save(self, step: int, wait: bool = False, epoch_ended: bool = True) -> None:
        state = self._task.state()
        state.tensors.update(random_state(self._around.world.device))
        state.values.update(metrics=self.metrics.state(), epoch_ended=epoch_ended)
        self._checkpoints.save(step, state, wait)

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self) -> None:
        self._checkpoints.close()
