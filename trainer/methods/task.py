"""Base class of all Tasks: a module with its engine, learning-rate schedule, mixed precision and finite guard."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from shards.errors import ConfigError, DataError
from trainer.acceleration.compile import compile_blocks
from trainer.acceleration.cuda_graphs import (
    GraphedStep,
    Inputs,
    StaticSizes,
    StepProgram,
    SyncPoint,
    Values,
    run_eagerly,
)
from trainer.acceleration.precision import autocast
from trainer.acceleration.streams import CaptureError, ExclusiveStream
from trainer.config.fitting import micro_batches
from trainer.config.optimisation import OptimizerConfig
from trainer.config.section import Precision
from trainer.distributed.flat_tensors import flatten_bytes
from trainer.distributed.world import World
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import EpochPlan, Schedule, StepIds
from trainer.methods.buffers import BufferSnapshot, batchnorm_statistics, load_statistics
from trainer.methods.networks import list_networks, to_device
from trainer.methods.weight_average import WeightAverage
from trainer.models.twin import TwinModel
from trainer.training.checkpoint import (
    TrainState,
    gather_rank_state,
    load_module,
    load_random_state,
    local_rank_state,
    module_state,
    random_state,
)
from trainer.training.engines import make_engine
from trainer.training.finite_guard import FiniteGuard
from trainer.training.optim import make_optimizer, scheduled_rate

_log = logging.getLogger(__name__)

_SMALLEST_SCALE = 1.0
_TABLE = "table."
"""Prefix in a checkpoint of a Task's own tables."""
_BUFFERS = "buffers"
"""Checkpoint key of the per-rank buffers, used if there are several ranks."""


@dataclass(frozen=True)
class TaskSettings:
    """Optimiser and execution settings of a training job."""

    optimizer: OptimizerConfig
    schedule: Schedule
    targets: torch.Tensor
    """Of each sample, by sample_id: labels, int64 [samples], or probabilities, float [samples, classes]."""
    world: World
    plan_epoch: Callable[[int], EpochPlan] | None = None
    """Plans any epoch ahead of the training; None if the Task itself plans each epoch after the one before."""
    precision: Precision = "fp32"
    micro: int | None = None
    """Maximum rows of a micro-batch, that is, of one forward with gradients; None: the whole batch."""
    exact: bool = True
    """Whether resuming must be bit-for-bit exact, as on CPUs and with `execution.deterministic`."""
    allow_accelerate: bool = False
    """Whether accelerate, if it is the launcher, may wrap the module. Not for INCV's folds: accelerate does not
    support process subgroups."""
    sync_batchnorm: bool = False
    graphs: bool = False
    """Whether to capture the step in CUDA graphs and replay them."""
    require_graphs: bool = False
    """Whether to raise an error if a step cannot be captured, instead of running it eagerly."""
    compile: bool = False
    """Whether to compile the networks' blocks with torch.compile."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes; the loss of a step applies it."""
    ema_decay: float | None = None
    """Decay of the moving average of the weights; None: no average."""
    ema_buffers: bool = False
    """Whether the average includes the BatchNorm statistics."""


class BaseTask(ABC):
    """Trains a module; subclasses define what a step reads (`inputs`) and computes (`compute_step`).

    A step is `begin_step`, `forward` and `backward` for each micro-batch, `reduce_gradients`, then `update`. It runs
    with no host-device sync, so that CUDA graphs can capture and replay it.
    """

    has_ended = False
    epoch_metrics: Mapping[str, float] = {}

    def __init__(self, module: nn.Module, setting: TaskSettings) -> None:
        self.world, self.device, self.precision = setting.world, setting.world.device, setting.precision
        self.module = _place_module(module, setting)
        # Held while the module uses it, so that no other training job gets the same stream.
        self._side_stream: ExclusiveStream | None = None
        if isinstance(self.module, TwinModel) and setting.graphs:
            self._side_stream = ExclusiveStream(self.device)
            self.module.side_stream = self._side_stream.stream
        self._micro, self.smoothing = setting.micro, setting.label_smoothing
        self.schedule, self._planner = setting.schedule, setting.plan_epoch
        # Captured CUDA graphs refer to the targets, so they are only ever changed in place. Fill rows look up those
        # of sample 0, which has label -1 if it is not in the run.
        self.targets = setting.targets.clamp(min=0).to(self.device)
        self.tables: dict[str, torch.Tensor] = {}
        """What a subclass wants in its checkpoints, by name; equal on all ranks, and only ever changed in place."""
        self._optimizer = setting.optimizer
        optimizer = make_optimizer(
            self.module,
            setting.optimizer.kind,
            setting.optimizer.weight_decay,
            setting.optimizer.momentum,
            setting.optimizer.decay_scope,
            setting.optimizer.learning_rate,
        )
        self._engine = make_engine(
            self.module, optimizer, self.world, setting.exact, setting.allow_accelerate, setting.graphs
        )
        self._average: WeightAverage | None = None
        if setting.ema_decay is not None:
            self._average = WeightAverage(self.module, setting.ema_decay, setting.ema_buffers)
        self._guard = FiniteGuard(self.device)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._statistics = {f"model.{name}": buffer for name, buffer in batchnorm_statistics(self.module).items()}
        if self._average is not None:
            self._statistics |= self._average.statistics()
        self._live = list(self._statistics.values())
        self._memory = BufferSnapshot(self.module)
        self._for_real = torch.ones((), dtype=torch.bool, device=self.device)
        self._graphed_step = (
            GraphedStep(self.compute_step, self.world, self.without_effects) if setting.graphs else None
        )
        self._require_graphs = setting.require_graphs
        self._compiles = setting.compile
        self.learning_rate = setting.optimizer.learning_rate
        self._engine_rate: float | None = None
        self._last: tuple[torch.Tensor, Values] | None = None

    @property
    def plans_ahead(self) -> bool:
        """Whether any epoch can be planned ahead of the training. Not if a method replaces `plan_epoch` by its own,
        which may read what the epochs before have found."""
        return type(self).plan_epoch is BaseTask.plan_epoch

    def plan_epoch(self, epoch: int) -> EpochPlan:
        """Return what the epoch's steps show: the same on all ranks, from `schedule.stream`, `epoch` and the state in
        checkpoints alone. A resume in mid-epoch plans the epoch again."""
        assert self._planner is not None, f"{type(self).__name__} has no plan and must define plan_epoch"
        return self._planner(epoch)

    def prepare_epoch(self, epoch: int) -> None:  # noqa: B027 - most methods have nothing to prepare
        """Change what `plan_epoch` and the steps of this epoch read, such as `targets`; all ranks call it.

        It is called once for each epoch, after the end of the epoch before. It may run passes, which a stop
        interrupts; it then runs again from the beginning, so it must change its state after its passes only.
        """

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        """Return what to do at the end of an epoch, in order. Each is done once, even if a stop comes between them;
        one that a stop interrupts in a pass runs again, so it must change its state after its pass only."""
        return [self._average_statistics]

    def inputs(self, batch: Batch, at: StepIds) -> tuple[Inputs, StaticSizes]:
        """Return a step's input tensors, on the device with fixed shapes, and the static sizes of its computation."""
        inputs = {"ids": batch.ids, "images": batch.images, "weights": batch.weights}
        if batch.mix is not None:
            inputs |= {"partners": batch.mix.partners, "shares": batch.mix.shares}
            inputs |= {} if batch.mix.boxes is None else {"boxes": batch.mix.boxes}
        return inputs, ()

    @abstractmethod
    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        """Compute one step; returns scalars for the metrics, including COUNTED (1 if the step has any real row)."""

    def step(self, batch: Batch, at: StepIds) -> Values:
        """Run one step and return its scalars, which the next step overwrites."""
        self.learning_rate = scheduled_rate(
            at.step, self.schedule.steps_per_epoch, self.schedule.total_steps, self._optimizer
        )
        if self.learning_rate != self._engine_rate:
            self._engine.set_rate(self.learning_rate)
            self._engine_rate = self.learning_rate
        if self._average is not None:
            self._average.set_step(at.step)
        inputs, fixed = self.inputs(batch, at)
        with self._compile_context(at):
            values = self._run_step(inputs, fixed)
        self._last = batch.ids, values
        return {name: value for name, value in values.items() if value.dim() == 0}

    def has_transient_shape(self, at: StepIds) -> bool:
        """Whether this step's shape is used for one epoch only and is therefore not worth compiling."""
        return False

    def _compile_context(self, at: StepIds) -> AbstractContextManager[None]:
        if self._compiles and self.has_transient_shape(at):
            return torch.compiler.set_stance("force_eager")
        return nullcontext()

    def _run_step(self, inputs: Inputs, fixed: StaticSizes) -> Values:
        if self._graphed_step is not None:
            try:
                return self._graphed_step(inputs, fixed)
            except CaptureError as error:
                if self._require_graphs:
                    raise ConfigError(
                        f"execution.graphs is true, but this network's step cannot be captured ({error}): set "
                        "execution.graphs to auto"
                    ) from error
                _log.warning("the step cannot be captured in a CUDA graph and runs eagerly (%s)", error)
                self._graphed_step = None
        return run_eagerly(self.compute_step(inputs, fixed), self.world)

    @property
    def chosen(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's sample_ids that networks a and b chose in the last step for their small loss; None if the
        method does not choose them so."""
        if self._last is None or "chosen_a" not in self._last[1]:
            return None
        ids, values = self._last
        of_a, of_b = values["chosen_a"], values["chosen_b"]
        return ids[of_a[of_a >= 0]], ids[of_b[of_b >= 0]]

    def parts(self, rows: int) -> list[slice]:
        return micro_batches(rows, self._micro)

    def begin_step(self) -> None:
        """Clear the gradients and snapshot the BatchNorm statistics, which `update` restores if it skips the step."""
        self._memory.keep()
        self._engine.zero_grad()

    def forward(self, *images: torch.Tensor, last: bool = True) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run a forward with gradients and return the logits. last: whether this is the last micro-batch."""
        with autocast(self.device, self.precision):
            logits: torch.Tensor | tuple[torch.Tensor, ...] = self._engine.forward(*images, last=last)
        return logits

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        """Accumulate the gradients of one micro-batch. share: the micro-batch's share of the global loss."""
        self._engine.backward(self._scaler.scale(share), last)

    def reduce_gradients(self, *totals: torch.Tensor) -> Generator[SyncPoint, None, torch.Tensor]:
        """All-reduce the gradients and the scalars in `totals`; return the sums: [len(totals)]."""
        sums = torch.stack([total.to(totals[0].dtype) for total in totals])
        yield SyncPoint((*self._engine.unreduced_gradients(), sums))
        return sums

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by `factor`, float [], which may depend on sums over all ranks and micro-batches."""
        self._engine.scale_gradients(factor)

    def update(self, loss: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Take an optimiser step, unless the loss or a gradient is not finite, or the step has no real rows.

        loss: summed over all ranks, so that they all decide alike; counted: bool [], whether there are real rows.
        Returns whether the step was taken: bool []. A Task must leave its own state unchanged if it was not.
        """
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._engine.optimizer)
        if self._optimizer.clip is not None:
            self._engine.clip(self._optimizer.clip, list_networks(self.module))
        has_loss = torch.isfinite(loss.detach())
        finite = self._engine.gradients_finite() & has_loss
        real = counted & self._for_real
        ok = finite & real
        self._engine.step(ok)
        self._memory.restore_unless(ok)
        if self._average is not None:
            self._average.update(ok)
        searching: torch.Tensor | None = None
        if self._scaler.is_enabled() and self._scaler.get_scale() > _SMALLEST_SCALE:
            searching = has_loss  # a lower scale may make the gradients finite, but not the loss
        self._guard.note(finite, real, searching)
        if self._scaler.is_enabled():
            self._scaler.update()
        return ok

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Context in which the module has its averaged weights, if there is an average (`ema`)."""
        return nullcontext() if self._average is None else self._average.applied()

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        """Context in which steps leave weights, moments, statistics, counters and random state unchanged."""
        draws = random_state(self.device)
        self._for_real.fill_(False)
        try:
            yield
        finally:
            self._for_real.fill_(True)
            load_random_state(draws, self.device)

    def close(self) -> None:
        """Release the memory and streams of captured steps; the module remains usable."""
        self._graphed_step = None
        if isinstance(self.module, TwinModel):
            self.module.side_stream = self._side_stream = None
        self._engine.zero_grad()

    def require_finite(self, wait: bool = True) -> None:
        """Raise if training has diverged. wait: for the device; otherwise this may notice it in a later call."""
        self._guard.require_finite(wait)

    def _average_statistics(self) -> None:
        """Average the BatchNorm statistics over the ranks."""
        if self.world.rank_group is not None and self._live:
            torch._foreach_copy_(self._live, self.world.all_reduce_mean(self._live))

    def state(self) -> TrainState:
        """Return the state to save: weights, BatchNorm statistics (averaged over ranks, and per rank for resuming),
        moments and counters."""
        tensors = module_state(self.module, "model.") | self._engine.moments()
        if self._average is not None:
            tensors |= self._average.state()
        tensors |= {f"{_TABLE}{name}": table for name, table in self.tables.items()}
        if self.world.size > 1 and self._live:
            tensors |= gather_rank_state(self.world, _BUFFERS, flatten_bytes(self._live))
            tensors |= dict(zip(self._statistics, self.world.all_reduce_mean(self._live), strict=True))
        values = {"guard": self._guard.state(), "scaler": self._scaler.state_dict(), "has_ended": self.has_ended}
        return TrainState(tensors, values)

    def load(self, state: TrainState) -> None:
        """Load the state in place, because captured CUDA graphs refer to the existing tensors."""
        load_module(self.module, state.tensors, "model.")
        if self._average is not None:
            self._average.load(state.tensors)
        for name, table in self.tables.items():
            saved = state.tensors.get(f"{_TABLE}{name}")
            if saved is None or (saved.shape, saved.dtype) != (table.shape, table.dtype):
                raise DataError(
                    f"the checkpoint's table `{name}` of {type(self).__name__} is missing or of another size: it "
                    "belongs to other data or another version of the method. Restart the stage with --redo"
                )
            table.copy_(saved)
        own = local_rank_state(self.world, _BUFFERS, state.tensors)
        if own is not None:  # otherwise the world size has changed, and the averaged statistics are used
            load_statistics(self._live, own)
        self._engine_rate = None
        self._engine.sync_weights()
        self._engine.load_moments(state.tensors)
        self._guard.load(state.values["guard"])
        self.has_ended = state.values["has_ended"]
        if self._scaler.is_enabled() and state.values.get("scaler"):
            self._scaler.load_state_dict(state.values["scaler"])


def _place_module(module: nn.Module, setting: TaskSettings) -> nn.Module:
    """Move the module to its device and memory layout, with SyncBatchNorm and compiled blocks if set."""
    world = setting.world
    if setting.sync_batchnorm and world.rank_group is not None:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module, world.group)
    module = to_device(module, world.device)
    if setting.compile:
        for network in list_networks(module):
            compile_blocks(network)
    return module
