"""The training loop: fetch a batch, run a step, log, save a checkpoint, obey stop requests."""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shards.errors import DataError
from shards.progress import Progress
from trainer.config.schema import ExecutionConfig
from trainer.distributed.stop import Stopped, StopRequest
from trainer.distributed.world import World
from trainer.loading.batch import Batches
from trainer.loading.epoch_plan import EpochPlan, PlanError, require_plan
from trainer.loading.sample_order import mix64
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import StartLog
from trainer.records.metrics import MetricsLog
from trainer.records.pace import NOTHING_LATER, Later, Pace, describe_pace
from trainer.records.profile_trace import StepTrace
from trainer.records.trace import Trace
from trainer.records.trackers import JobTrackers, TrackerSettings
from trainer.training.checkpoint import (
    Checkpointer,
    TrainState,
    find_newest_checkpoint,
    gather_rank_state,
    load_random_state,
    local_rank_state,
    random_state,
    read_checkpoint,
    step_folder,
)
from trainer.training.task import Task

_log = logging.getLogger(__name__)

_SHARE_AT_STAKE = 5  # save a checkpoint at least every fifth of a training job


@dataclass(frozen=True)
class TrainingJob:
    """A training job of the run: its stage, folder, round and fold."""

    stage: str
    folder: Path
    round: int | None = None
    fold: int | None = None
    identity: str | None = None
    """Hash of the recipe keys that affect the job's result; a checkpoint with a different hash is rejected."""
    title: str | None = None
    """What the progress view calls the job; None: its name."""
    later: Later = NOTHING_LATER
    """The training that follows the job, for the time left."""

    @property
    def name(self) -> str:
        return self.stage if self.round is None else f"{self.stage}/{self.round}/{self.fold}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class RunContext:
    """The context that all training jobs share within one start of the run."""

    world: World
    """All ranks, or the ranks of one fold."""
    execution: ExecutionConfig
    start_log: StartLog
    stop: StopRequest
    heartbeat: Heartbeat
    trace: Trace | None = None
    profile: bool = False
    """Whether to write a torch.profiler trace of each training job."""
    trackers: TrackerSettings | None = None
    work_after: Mapping[str, float] = field(default_factory=dict)
    """By stage, the image passes through a network of all trainings in later stages."""


def checkpoint_interval(total_steps: int, checkpoint_every: int) -> int:
    return min(checkpoint_every, max(1, total_steps // _SHARE_AT_STAKE))


BatchesFrom = Callable[[Iterable[EpochPlan], int], Batches]
"""Returns a batch for each step of these epochs, from the given step of the job on."""


def train(training: TrainingJob, task: Task, batches_from: BatchesFrom, ctx: RunContext) -> None:
    """Train `task` to the end of its schedule, resuming from its newest checkpoint if it has one. All ranks call
    this."""
    for _ in iterate_training(training, task, batches_from, ctx):
        pass


def iterate_training(
    training: TrainingJob, task: Task, batches_from: BatchesFrom, ctx: RunContext
) -> Generator[None, None, None]:
    """Like `train`, but as a generator that yields after every step, so that jobs can be interleaved."""
    records, total = _TrainingRecords(training, task, ctx), task.schedule.total_steps
    interval = checkpoint_interval(total, ctx.execution.checkpoint_every)
    stop_consensus = ctx.world.stop_consensus(ctx.stop.reason)
    clock = Pace(total, training.later)
    try:
        first = records.begin()
        with (
            Progress(training.title or training.name, total, first, "steps") as progress,
            closing(_open_batches(training, task, batches_from, first, records)) as batches,
        ):
            for batch in clock.time_waits(batches):
                at = batch.step
                assert at is not None, "a training batch must have its step set"
                ctx.heartbeat.update(training.name, at.step, total)
                stop_consensus.post()
                records.metrics.add(task.step(batch, at))
                clock.end_step(sum(map(len, at.parts)))
                if at.step == first:  # which may compile
                    ctx.world.set_timeout(ctx.execution.timeout)
                if ctx.trace is not None:
                    ctx.trace.step(training.name, at.step, batch, task.chosen)
                done = at.step + 1
                progress.advance(1, records.log(done, clock))
                with clock.aside():
                    records.trace_step()
                    records.cross_border(done)
                    finished = done == total or task.has_ended
                    if stop_consensus.result() and not finished:
                        records.save(done, wait=True)
                        raise Stopped(training.name, done, ctx.stop.wait_for_reason(), training.title)
                    if finished or done % interval == 0:
                        records.save(done)
                yield
                if finished:
                    break
        records.wait()
    finally:
        records.close()
        task.close()


def _open_batches(
    training: TrainingJob, task: Task, batches_from: BatchesFrom, first: int, records: "_TrainingRecords"
) -> Batches:
    """Yield a batch for each step from `first` on.

    If epochs can be planned ahead, loaders prefetch across their borders. Otherwise an epoch is planned when its
    first batch is asked for, that is, after `prepare_epoch`.
    """
    schedule = task.schedule
    epochs = range(first // schedule.steps_per_epoch, 0 if task.has_ended else schedule.epochs)
    plans = map(records.plan_epoch, epochs)
    expected = first
    for group in [plans] if task.plans_ahead else ([plan] for plan in plans):
        with closing(batches_from(group, first)) as batches:
            for batch in batches:
                found = None if batch.step is None else batch.step.step
                assert found == expected, f"{training.name}: the loader returned step {found} instead of {expected}"
                expected += 1
                yield batch
    assert task.has_ended or expected == schedule.total_steps, f"{training.name}: the loader returned too few batches"


class _TrainingRecords:
    """Checkpoints, metrics, executed steps and profile of a training job; only rank 0 writes them."""

    def __init__(self, training: TrainingJob, task: Task, ctx: RunContext) -> None:
        self._training, self._task, self._schedule, self._ctx = training, task, task.schedule, ctx
        self._writes = ctx.world.is_rank0
        self._checkpoints = Checkpointer(training.checkpoints)
        self._first = 0  # step from which this start goes on
        self.metrics = MetricsLog(training.folder / "metrics.jsonl", self._writes)
        self._trackers: JobTrackers | None = None
        traces = ctx.profile and self._writes
        self._profile = StepTrace(ctx.world.device, training.folder) if traces else None
        self._plan: str | None = None
        self._measured: dict[str, float] = {}  # by an earlier start, at the border where a stop has ended it

    def begin(self) -> int:
        """Resume, or save a checkpoint of step 0; start the trackers; return the step to continue from."""
        step = self._resume()
        settings = self._ctx.trackers
        if self._writes and settings is not None and step < self._schedule.total_steps:
            self._trackers = settings.open(self._training.name, step, self._training.identity)
            self.metrics.on_line = self._trackers.log
        return step

    def _resume(self) -> int:
        """Load the newest checkpoint, or save one for step 0 if there is none; return the step to continue from."""
        resumed = self._load_newest()
        if resumed is None:
            if self._writes:  # a start that was killed before its first checkpoint may have left a line of step 0
                self.metrics.truncate_after(-1)
            self.cross_border(0)
            self.save(0, wait=True)
            return 0
        step, border = resumed
        self._first = step
        if self._writes:
            self.metrics.truncate_after(step)
            self._ctx.start_log.record_resume(self._training.stage, self._training.round, self._training.fold, step)
            if 0 < step < self._schedule.total_steps:
                _log.info("%s: resuming from step %d", self._training.title or self._training.name, step)
        if border is not None:
            self.cross_border(step, border)
            self.save(step, wait=True)  # with what was found between the epochs, since this may be the last step
        return step

    def _load_newest(self) -> tuple[int, int | None] | None:
        """Restore the newest checkpoint, if any; return its step and, if a stop came between two epochs, how many
        pieces of the work between them are done."""
        world = self._ctx.world
        newest = world.run_on_rank0(self._find_newest)
        step = world.broadcast_from_rank0(lambda: None if newest is None else newest[0])
        if step is None:
            return None
        # Rank 0 has already read the state, to verify that it is readable.
        state = newest[1] if newest is not None else read_checkpoint(step_folder(self._training.checkpoints, step))
        self._require_own(step, state)
        self._task.load(state)
        self._load_random(step, state)
        self.metrics.load(state.values["metrics"], world.device)
        self._plan, self._measured = state.values["plan"], state.values["measured"]
        return int(step), state.values["border"]

    def _find_newest(self) -> tuple[int, TrainState] | None:
        newest = find_newest_checkpoint(self._training.checkpoints)
        if newest is None:
            self._refuse_to_start_over()
        return newest

    def _require_own(self, step: int, state: TrainState) -> None:
        saved, own = state.values.get("identity"), self._training.identity
        if saved is not None and own is not None and saved != own:
            raise DataError(
                f"{step_folder(self._training.checkpoints, step)} was written by another recipe, not the one that "
                f"trains {self._training.name} now: restore the right checkpoint, choose another --run-dir, or "
                f"restart the stage with `--redo {self._training.stage}`"
            )

    def _load_random(self, step: int, state: TrainState) -> None:
        """Restore this rank's random state; if the world size has changed, seed it from the step and the rank."""
        world = self._ctx.world
        own = {name: local_rank_state(world, name, state.tensors) for name in random_state(world.device)}
        saved = {name: tensor for name, tensor in own.items() if tensor is not None}
        if "random.cpu" in saved:
            load_random_state(saved, world.device)
        else:
            torch.manual_seed(int(mix64(self._schedule.stream, step, world.rank)))

    def _refuse_to_start_over(self) -> None:
        if self.metrics.has_steps():
            folder, checkpoints = self._training.folder, self._training.checkpoints
            raise DataError(
                f"{self._training.name} has logged progress in {folder / 'metrics.jsonl'}, but {checkpoints} holds "
                "no readable checkpoint: its progress is lost. Restore the checkpoints, or restart the stage with "
                f"`--redo {self._training.stage}`"
            )

    def trace_step(self) -> None:
        """Tell the profiler, if any, that a step has ended."""
        if self._profile is not None:
            self._profile.end_step()

    def log(self, done: int, clock: Pace) -> str:
        """If a line is due, log the steps since the last one; return a short text. The first and the last line wait
        for the device, which is left idle then."""
        last = done == self._schedule.total_steps
        # Log the first step too: metrics without any checkpoint then prove that progress was lost.
        if done > 1 and not last and done % self._ctx.execution.log_every:
            return ""
        wait, times = done == 1 or last, clock.measure(done)
        self._task.require_finite(wait)
        epoch = round(done / self._schedule.steps_per_epoch, 3)
        line = self.metrics.write(wait, step=done, epoch=epoch, learning_rate=self._task.learning_rate, **times)
        return f"{describe_pace(times, epoch, self._schedule.epochs)}, {line}"

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return the Task's plan for an epoch; an error if it breaks its promises, or differs from what the epoch had
        before a resume."""
        name = self._training.name
        plan = self._task.plan_epoch(epoch)
        try:
            require_plan(plan, self._schedule, epoch)
        except PlanError as error:
            raise DataError(f"{name}: {error}") from None
        if not self._task.plans_ahead:
            digest, before = plan.digest(), self._plan
            self._ctx.world.require_equal(digest, f"{name}'s plan of epoch {epoch + 1}")
            if before is not None and before != digest:
                raise DataError(
                    f"{name}: the plan of epoch {epoch + 1} is not the one with which the epoch began before the "
                    "interruption, because what it is made from has changed since: restore it, or restart the stage "
                    f"with `--redo {self._training.stage}`"
                )
            self._plan = digest
        return plan

    def cross_border(self, done: int, already: int = 0) -> None:
        """If an epoch ends here, do what is due between it and the next. If a stop interrupts it, save a checkpoint
        from which the next start goes on.

        Args:
            already: How many pieces of this work an earlier start has done.
        """
        epoch, inside = divmod(done, self._schedule.steps_per_epoch)
        if inside:
            return
        self._plan = None
        work = list(self._task.after_epoch(epoch - 1)) if done else []
        if epoch < self._schedule.epochs:
            work.append(lambda: None if self._task.has_ended else self._task.prepare_epoch(epoch))
        for number in range(already, len(work)):
            try:
                work[number]()
            except Stopped as stopped:
                self.save(done, wait=True, border=number)
                raise Stopped(self._training.name, done, stopped.reason, self._training.title) from None
        if found := {**self._measured, **self._task.epoch_metrics}:
            self.metrics.write(step=done, epoch=epoch, **found)
        self._measured = {}

    def save(self, step: int, wait: bool = False, border: int | None = None) -> None:
        """Save a checkpoint: all ranks take part in gathering the per-rank state, and rank 0 writes it.

        The manifest counts the steps of this start up to here: those after the last checkpoint of a killed start are
        executed again.

        Args:
            border: How much of the work between two epochs is done; None: all of it.
        """
        world = self._ctx.world
        state = self._task.state()
        for name, own in random_state(world.device).items():
            state.tensors.update(gather_rank_state(world, name, own))
        state.values.update(
            metrics=self.metrics.state(),
            border=border,
            measured={} if border is None else {**self._measured, **self._task.epoch_metrics},
            plan=self._plan,
            identity=self._training.identity,
        )
        if self._writes:
            self._ctx.start_log.record_steps(self._training.name, step - self._first)
            self._checkpoints.save(step, state, wait)

    def wait(self) -> None:
        self._checkpoints.wait()

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()
        if self._profile is not None:
            self._profile.close()
        self._checkpoints.close()
