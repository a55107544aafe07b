"""What all methods share: a module, its engine at the schedule's rate, mixed precision, the finite guard."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer.checkpoint import TrainState, load_module, module_state, of_every_rank, own_of
from trainer.config import OptimizerConfig, Precision, Recipe
from trainer.engines import make_engine
from trainer.finite_guard import FiniteGuard
from trainer.loading.batch import Batch
from trainer.loading.sample_order import TrainingPlan
from trainer.methods.micro_batches import micro_batches
from trainer.methods.networks import networks_of
from trainer.optimisation import learning_rate_at, make_optimizer
from trainer.world import World

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST_SCALE = 1.0


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    return torch.autocast(device.type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST)


def image_type(precision: Precision) -> torch.dtype:
    """What images are loaded as: the type in which autocast would give them to the first layer anyway."""
    return _AUTOCAST.get(precision, torch.float32)


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each row, in fp32 whatever the precision (fp64 for a network in fp64): [rows]."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, reduction="none")


@dataclass(frozen=True)
class Setting:
    """Where and how a module is trained."""

    optimizer: OptimizerConfig
    steps_per_epoch: int
    world: World
    precision: Precision = "fp32"
    micro: int | None = None
    """Most rows of a forward with gradient; None: all rows of the batch."""
    exact: bool = True
    """Whether a resumed training must be bit for bit the undisturbed one (CPUs, and `execution.deterministic`)."""
    by_launcher: bool = False
    """Whether accelerate, where it launched us, drives the module; not in a fold's group, which it cannot know."""
    sync_batchnorm: bool = False


def setting_of(
    recipe: Recipe, optimizer: OptimizerConfig, plan: TrainingPlan, world: World, by_launcher: bool = False
) -> Setting:
    """What a recipe says of a training by `plan` in `world`."""
    return Setting(
        optimizer,
        plan.steps_per_epoch,
        world,
        recipe.precision,
        recipe.batch.micro,
        exact=world.device.type == "cpu" or recipe.execution.deterministic,
        by_launcher=by_launcher,
        sync_batchnorm=recipe.model.sync_batchnorm,
    )


class OptimisedModule:
    """A module under training; methods add what a step computes.

    A step is `begin_step`, then `forward` and `backward` for each part of the batch, then `apply`.
    """

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        self.world, self.device, self.precision = setting.world, setting.world.device, setting.precision
        if setting.sync_batchnorm and self.world.ties is not None:
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module, self.world.group)
        self.module = module.to(self.device)
        self._micro = setting.micro
        self._schedule, self._steps_per_epoch = setting.optimizer, setting.steps_per_epoch
        optimizer = make_optimizer(
            self.module,
            setting.optimizer.kind,
            setting.optimizer.weight_decay,
            setting.optimizer.momentum,
            setting.optimizer.decay_scope,
            setting.optimizer.learning_rate,
        )
        self._engine = make_engine(self.module, optimizer, self.world, setting.exact, setting.by_launcher)
        self._guard = FiniteGuard()
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self._buffers = {name: b for name, b in self.module.named_buffers() if b.is_floating_point()}
        self._live = list(self._buffers.values())
        self._before = [b.clone() for b in self._live]
        self.learning_rate = setting.optimizer.learning_rate
        self.chosen: tuple[torch.Tensor, torch.Tensor] | None = None
        """Of the last step, for methods of two networks: this rank's sample_ids that were easy for a, and for b."""

    def parts(self, rows: int) -> list[slice]:
        return micro_batches(rows, self._micro)

    def rows_of_all(self, batch: Batch) -> torch.Tensor:
        """How many rows of the step count, over all ranks: float32 []."""
        return self.world.sum_(batch.weights.sum())

    def begin_step(self) -> None:
        """Before the forward: BatchNorm learns in it, and must forget a batch that is not finite."""
        if self._live:
            torch._foreach_copy_(self._before, self._live)
        self._engine.zero_grad()

    def forward(self, *images: torch.Tensor, last: bool = True) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Logits, of a forward in train mode that gradients go back through."""
        with autocast(self.device, self.precision):
            logits: torch.Tensor | tuple[torch.Tensor, ...] = self._engine.forward(*images, last=last)
        return logits

    def backward(self, share: torch.Tensor, last: bool = True) -> None:
        """Add the gradients of one part's share of the loss of all ranks to those of the parts before it."""
        self._engine.backward(self._scaler.scale(share), last)

    def apply(self, loss: torch.Tensor, step: int) -> None:
        """One optimiser step at the schedule's rate, unless the loss or a gradient is not finite.

        loss: of all rows of all ranks, so that all ranks decide alike.
        """
        schedule = self._schedule
        self.learning_rate = learning_rate_at(
            step, self._steps_per_epoch, schedule.learning_rate, schedule.milestones, schedule.warmup_epochs
        )
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._engine.optimizer)
        if schedule.clip is not None:
            self._engine.clip(schedule.clip, networks_of(self.module))
        searching = self._scaler.is_enabled() and self._scaler.get_scale() > _SMALLEST_SCALE
        if not self._guard.step(self._engine, loss, self.learning_rate, searching) and self._live:
            torch._foreach_copy_(self._live, self._before)
        if self._scaler.is_enabled():
            self._scaler.update()

    def end_epoch(self, epoch: int) -> None:
        """Ranks that saw different rows agree on BatchNorm's statistics."""
        if self.world.ties is not None and self._live:
            torch._foreach_copy_(self._live, self.world.mean_of(self._live))

    def state(self) -> TrainState:
        """Weights with the mean of all ranks' statistics, and each rank's own to go on with."""
        tensors = module_state(self.module, "model.")
        if self.world.size > 1 and self._buffers:
            own = {f"model.{name}": buffer for name, buffer in self._buffers.items()}
            tensors |= of_every_rank(self.world, own)
            tensors |= dict(zip(own, self.world.mean_of(self._live), strict=True))
        tensors |= self._engine.moments()
        return TrainState(tensors, {"guard": self._guard.state(), "scaler": self._scaler.state_dict()})

    def load(self, state: TrainState) -> None:
        load_module(self.module, state.tensors, "model.")
        own = own_of(self.world, state.tensors)
        for name, buffer in self._buffers.items():
            if f"model.{name}" in own:
                buffer.copy_(own[f"model.{name}"])
        self._engine.weights_changed()
        self._engine.load_moments(state.tensors)
        self._guard.load(state.values["guard"])
        if self._scaler.is_enabled() and state.values.get("scaler"):
            self._scaler.load_state_dict(state.values["scaler"])
