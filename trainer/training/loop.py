"""The training loop: fetch a batch, run a step, log, save a checkpoint, obey stop requests."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shards.errors import DataError
from shards.progress import Progress
from trainer.config.schema import ExecutionConfig
from trainer.distributed.stop import Stopped, StopRequest
from trainer.distributed.world import World
from trainer.loading.batch import Batches
from trainer.loading.sample_order import TrainingPlan, mix64
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import StartLog
from trainer.records.metrics import MetricsLog
from trainer.records.pace import NOTHING_LATER, Later, Pace, describe_pace
from trainer.records.profile import Profile, Stopwatch, time_data_wait
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
    profile: Profile | None = None
    trackers: TrackerSettings | None = None
    work_after: Mapping[str, float] = field(default_factory=dict)
    """By stage, the image passes through a network of all trainings in later stages."""

    def watch(self, training: str) -> Stopwatch | None:
        """Return the stopwatch of the training job; None without --profile."""
        return None if self.profile is None else self.profile.of(training)

    def time_phase(self, phase: str, training: str) -> AbstractContextManager[None]:
        """Return a context whose duration the profile counts as `phase` of the job; a no-op if not profiling."""
        watch = self.watch(training)
        return nullcontext() if watch is None else watch.within(phase)


def checkpoint_interval(total_steps: int, checkpoint_every: int) -> int:
    return min(checkpoint_every, max(1, total_steps // _SHARE_AT_STAKE))


def train(
    training: TrainingJob,
    task: Task,
    plan: TrainingPlan,
    batches_from: Callable[[int], Batches],
    ctx: RunContext,
) -> None:
    """Train `task` to the end of the plan, resuming from its newest checkpoint if it has one. All ranks call this."""
    for _ in iterate_training(training, task, plan, batches_from, ctx):
        pass


def iterate_training(
    training: TrainingJob,
    task: Task,
    plan: TrainingPlan,
    batches_from: Callable[[int], Batches],
    ctx: RunContext,
) -> Generator[None, None, None]:
    """Like `train`, but as a generator that yields after every step, so that jobs can be interleaved."""
    records = _TrainingRecords(training, task, plan, ctx)
    interval = checkpoint_interval(plan.total_steps, ctx.execution.checkpoint_every)
    stop_consensus = ctx.world.stop_consensus(ctx.stop.reason)
    watch = ctx.watch(training.name)
    try:
        if watch is not None:
            watch.begin()
        first = records.begin()
        with (
            Progress(training.title or training.name, plan.total_steps, first, "steps") as progress,
            closing(batches_from(first)) as batches,
        ):
            pace = Pace(plan.total_steps, training.later)
            timed = pace.time_waits(time_data_wait(batches, watch))
            for expected, batch in zip(range(first, plan.total_steps), timed, strict=True):
                if task.has_ended:  # in an earlier start
                    break
                at = batch.step
                assert at is not None, "a training batch must have its step set"
                assert at.step == expected, f"the loader returned step {at.step} instead of step {expected}"
                ctx.heartbeat.update(training.name, at.step, plan.total_steps)
                stop_consensus.post()
                records.metrics.add(task.step(batch, at))
                if watch is not None:
                    watch.end_step()
                if ctx.trace is not None:
                    ctx.trace.step(training.name, at.step, batch, task.chosen)
                done = at.step + 1
                pace.end_step(len(at.selected) + len(at.candidates))
                records.count(at.step == first)
                finished = done == plan.total_steps
                # Log the first step too: metrics without any checkpoint then prove that progress was lost.
                due = done == 1 or finished or done % ctx.execution.log_every == 0
                note = records.log(done, done == 1 or finished, pace.measure(done)) if due else ""
                progress.advance(1, note)
                with pace.aside():
                    if done % plan.steps_per_epoch == 0:
                        records.end_epoch(done)
                        finished = finished or task.has_ended
                    if stop_consensus.result() and not finished:
                        records.save(done, wait=True)
                        raise Stopped(training.name, done, ctx.stop.wait_for_reason(), training.title)
                    if finished or done % interval == 0:
                        records.save(done)
                with nullcontext() if watch is None else watch.aside():
                    yield
                if task.has_ended:
                    break
        records.wait()
    finally:
        records.close()
        task.close()


class _TrainingRecords:
    """Checkpoints and metrics of a training job; only rank 0 writes them."""

    def __init__(self, training: TrainingJob, task: Task, plan: TrainingPlan, ctx: RunContext) -> None:
        self._training, self._task, self._plan, self._ctx = training, task, plan, ctx
        self._writes = ctx.world.is_rank0
        self._checkpoints = Checkpointer(training.checkpoints)
        self._counter = ctx.start_log.open_counter(training.name) if self._writes else None
        self.metrics = MetricsLog(training.folder / "metrics.jsonl", self._writes)
        self._trackers: JobTrackers | None = None

    def begin(self) -> int:
        """Resume, or save a checkpoint of step 0; start the trackers; return the step to continue from."""
        step = self._resume()
        settings = self._ctx.trackers
        if self._writes and settings is not None and step < self._plan.total_steps:
            self._trackers = settings.open(self._training.name, step, self._training.identity)
            self.metrics.on_line = self._trackers.log
        return step

    def _resume(self) -> int:
        """Load the newest checkpoint, or save one for step 0 if there is none; return the step to continue from."""
        with self._for_checkpoints():
            resumed = self._load_newest()
        if resumed is None:
            self.save(0, wait=True)
            return 0
        step, epoch_ended = resumed
        if self._writes:
            self.metrics.truncate_after(step)
            self._ctx.start_log.record_resume(self._training.stage, self._training.round, self._training.fold, step)
            if 0 < step < self._plan.total_steps:
                _log.info("%s: resuming from step %d", self._training.title or self._training.name, step)
        if not epoch_ended:
            self.end_epoch(step)
            self.save(step, wait=True)  # with what the end of the epoch has found, since this may be the last step
        return step

    def _load_newest(self) -> tuple[int, bool] | None:
        """Restore the newest checkpoint, if any; return its step and whether `end_epoch` had run before the save."""
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
        return int(step), state.values["epoch_ended"]

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
            torch.manual_seed(int(mix64(self._plan.stream, step, world.rank)))

    def _refuse_to_start_over(self) -> None:
        if self.metrics.has_lines():
            folder, checkpoints = self._training.folder, self._training.checkpoints
            raise DataError(
                f"{self._training.name} has logged progress in {folder / 'metrics.jsonl'}, but {checkpoints} holds "
                "no readable checkpoint: its progress is lost. Restore the checkpoints, or restart the stage with "
                f"`--redo {self._training.stage}`"
            )

    def count(self, is_first_step: bool) -> None:
        """Count a step; after the first one since the start, set the collectives' timeout to `execution.timeout`."""
        if self._counter is not None:
            self._counter.add()
        if is_first_step:
            self._ctx.world.set_timeout(self._ctx.execution.timeout)

    def log(self, done: int, wait: bool, times: Mapping[str, float]) -> str:
        """Log the steps since the last line; return a short text. wait: for the device, which is left idle then."""
        self._task.require_finite(wait)
        epoch = round(done / self._plan.steps_per_epoch, 3)
        last = self.metrics.write(wait, step=done, epoch=epoch, learning_rate=self._task.learning_rate, **times)
        return f"{describe_pace(times, epoch, self._plan.epochs)}, {last}"

    def end_epoch(self, done: int) -> None:
        """Run the task's `end_epoch`. If a stop interrupts it, save a checkpoint and let the next start repeat it."""
        try:
            self._task.end_epoch(done // self._plan.steps_per_epoch - 1)
        except Stopped as stopped:
            self.save(done, wait=True, epoch_ended=False)
            raise Stopped(self._training.name, done, stopped.reason, self._training.title) from None
        if self._task.epoch_metrics:
            self.metrics.write(step=done, epoch=done // self._plan.steps_per_epoch, **self._task.epoch_metrics)

    def save(self, step: int, wait: bool = False, epoch_ended: bool = True) -> None:
        """Save a checkpoint: all ranks take part in gathering the per-rank state, and rank 0 writes it."""
        world = self._ctx.world
        with self._for_checkpoints():
            state = self._task.state()
            for name, own in random_state(world.device).items():
                state.tensors.update(gather_rank_state(world, name, own))
            state.values.update(
                metrics=self.metrics.state(),
                epoch_ended=epoch_ended,
                identity=self._training.identity,
            )
            if self._writes:
                self._checkpoints.save(step, state, wait)
        if self._writes:
            self._write_profile()

    def _for_checkpoints(self) -> AbstractContextManager[None]:
        return self._ctx.time_phase("checkpoint", self._training.name)

    def _write_profile(self) -> None:
        """Write the profile. Called with every checkpoint, so that after a kill both cover the same steps."""
        training, watch = self._training, self._ctx.watch(self._training.name)
        if watch is not None:
            watch.write(training.folder, training.stage, training.round, training.fold)

    def wait(self) -> None:
        with self._for_checkpoints():
            self._checkpoints.wait()

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()
        if self._counter is not None:
            self._counter.close()
        self._checkpoints.close()
        if self._writes:
            self._write_profile()
