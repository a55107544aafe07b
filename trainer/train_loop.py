"""The one loop: fetch, task step, log, checkpoint, stop."""

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
    checkpoints = Checkpointer(training.checkpoints)
    metrics = MetricsLog(training.folder / "metrics.jsonl")
    counter = around.manifest.counter(training.name)
    interval = checkpoint_interval(plan.total_steps, around.execution.checkpoint_every)
    device = around.world.device

    def save(step: int, wait: bool = False) -> None:
        state = task.state()
        state.tensors.update(random_state(device))
        state.values["metrics"] = metrics.state()
        checkpoints.save(step, state, wait)

    try:
        first = _resume(training, task, metrics, around)
        if first is None:
            first = 0
            save(0, wait=True)
        with Progress(training.name, plan.total_steps, first, "steps") as progress:
            steps = plan.steps(first)
            for at, batch in zip(steps, batches_from(first), strict=True):
                metrics.add(task.step(batch, at))
                counter.add()
                done = at.step + 1
                if done % plan.steps_per_epoch == 0:
                    task.end_epoch(at.epoch)
                note = ""
                if done % around.execution.log_every == 0 or done == plan.total_steps:
                    epoch = round(done / plan.steps_per_epoch, 3)
                    note = metrics.write(step=done, epoch=epoch, learning_rate=task.learning_rate)
                progress.advance(1, note)
                reason = around.stop.reason()
                if reason is not None and done < plan.total_steps:
                    save(done, wait=True)
                    raise Stopped(training.name, done, reason)
                if done % interval == 0 or done == plan.total_steps:
                    save(done)
        checkpoints.wait()
    finally:
        counter.close()
        checkpoints.close()


def _resume(training: Training, task: Task, metrics: MetricsLog, around: Surroundings) -> int | None:
    """Load the newest checkpoint and return its step; None where this training has not begun."""
    found = newest_checkpoint(training.checkpoints)
    if found is None:
        if metrics.has_lines():
            raise DataError(
                f"{training.name} has logged progress in {training.folder / 'metrics.jsonl'}, but "
                f"{training.checkpoints} holds no readable checkpoint: its progress is lost. Put the checkpoints "
                f"back, or begin the stage again with `--redo {training.stage}`"
            )
        return None
    step, state = found
    task.load(state)
    load_random_state(state.tensors, around.world.device)
    metrics.load(state.values["metrics"], around.world.device)
    metrics.cut_back(step)
    around.manifest.resumed(training.stage, training.round, training.fold, step)
    return step
