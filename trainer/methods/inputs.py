"""What a training method gets to build its Task from, the settings of a Task, and what a method returns."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.acceleration.policy import choose_acceleration
from trainer.config.fitting import count_steps, fit_section
from trainer.config.schema import Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.loading.epoch_plan import Mixing, Schedule, StaticPlan
from trainer.loading.sample_order import Ids, build_windows, derive_stream
from trainer.methods.method import Method
from trainer.methods.networks import build_module
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.weights import Weights
from trainer.passes.sample_pass import SamplePass


@dataclass(frozen=True)
class NoiseFacts:
    """INCV's noise estimates that methods may use."""

    ratio: float
    """ε, from the estimator named in `incv.noise_estimate`."""
    selected_confident: float
    """ε_S, the noise ratio of the selected samples, from the confident estimate of T (Prop. 2)."""
    selected_held_out: float
    """ε_S from the confusion matrix of the held-out predictions."""


@dataclass(frozen=True, eq=False)
class IncvFacts:
    """What INCV found."""

    selected: Ids
    """S, the selected samples."""
    candidates: Ids
    """C, the remaining candidates."""
    noise: NoiseFacts


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """Everything a method may read when it builds its task."""

    method: Method
    recipe: Recipe
    classes: int
    samples: Ids
    """All samples of the run."""
    labels: npt.NDArray[np.int64]
    """The given label of each sample, indexed by sample_id."""
    shards: npt.NDArray[np.integer]
    """The shard of each sample, indexed by sample_id."""
    world: World
    folder: Path
    """The method's folder in the run directory."""
    passes: SamplePass
    """Runs networks over training samples, outside of the steps."""
    trained_networks: Callable[[str], list[nn.Module]]
    """Returns the networks of a method in `Method.inputs`, on the device and in eval mode."""
    weights: Weights | None
    """Weights that the networks start from, apart from their classifiers; None: random ones."""
    found: IncvFacts | None
    """What INCV found; None unless the method's inputs include `selection` or `noise_estimate`."""

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def config(self) -> Any:
        """The method's own recipe section."""
        return self.method.config(self.recipe)

    @property
    def incv(self) -> IncvFacts:
        """What INCV found, for a method that declares to read it."""
        if self.found is None:
            raise TypeError(
                f"the method {self.name} reads what INCV found, but its record does not say so: add `selection` or "
                "`noise_estimate` to its `inputs`"
            )
        return self.found

    def fit_config(self, selected: Ids) -> Any:
        """Return `config` with its epochs raised to give a training on `selected` at least `min_steps` steps."""
        return fit_section(self.config, count_steps(len(selected), self.recipe.batch.rows))

    def plan(self, selected: Ids, candidates: Ids | None = None, candidates_from: int = 0) -> StaticPlan:
        """Build a plan of `fit_config`'s epochs over `selected`; `candidates` join at epoch `candidates_from`."""
        plan = StaticPlan(
            stream=derive_stream(self.recipe.seed, self.name),
            selected=selected,
            batch=self.recipe.batch.rows,
            epochs=self.fit_config(selected).epochs,
            windows=build_windows(self.recipe.order, self.shards),
            mixing=Mixing(self.config.mixup.alpha) if self.config.mixup.alpha else None,
        )
        if candidates is None:
            return plan
        return replace(plan, candidates=candidates, candidates_from=candidates_from)

    def schedule(self, steps_per_epoch: int, rows: int) -> Schedule:
        """Return the schedule of a Task that plans each epoch itself, over all samples of the run.

        Args:
            rows: Rows of a full step, over all ranks; each look at an id is one.
        """
        epochs = fit_section(self.config, steps_per_epoch).epochs
        return Schedule(derive_stream(self.recipe.seed, self.name), epochs, steps_per_epoch, rows, self.samples)

    def module(self) -> nn.Module:
        """Build the method's networks with initial weights: one network, or a TwinModel."""
        return build_module(self.recipe, self.name, self.method.networks, self.classes, self.weights)

    def settings(self, plan: StaticPlan | Schedule) -> TaskSettings:
        """Build the training and execution settings for `plan`, or for a Task that plans each epoch of a schedule."""
        schedule = plan.schedule if isinstance(plan, StaticPlan) else plan
        section = fit_section(self.config, schedule.steps_per_epoch)
        labels = torch.from_numpy(self.labels)
        return build_task_settings(self.recipe, section, plan, labels, self.world, allow_accelerate=True)


@dataclass(frozen=True, eq=False)
class MethodTraining:
    """A method's task, ready to train."""

    task: BaseTask
    facts: dict[str, Any] = field(default_factory=dict)
    """Entries of `training.json`, besides those of the schedule or instead of them."""


def build_task_settings(
    recipe: Recipe,
    section: TrainingConfig,
    plan: StaticPlan | Schedule,
    targets: torch.Tensor,
    world: World,
    allow_accelerate: bool = False,
    steps: int | None = None,
) -> TaskSettings:
    """Build the settings of a training job in `world`, from the recipe and a section of it.

    Args:
        plan: What all epochs train on, or the schedule of a Task that plans each epoch itself.
        targets: As in TaskSettings.
        steps: Steps for which compilation and CUDA graphs must pay off; None: those of the plan.
    """
    schedule, planner = (plan.schedule, plan.plan_epoch) if isinstance(plan, StaticPlan) else (plan, None)
    acceleration = choose_acceleration(recipe, steps or schedule.total_steps, world, allow_accelerate)
    return TaskSettings(
        section.optimizer,
        schedule,
        targets,
        world,
        planner,
        recipe.precision,
        recipe.batch.micro,
        exact=world.device.type == "cpu" or recipe.execution.deterministic,
        allow_accelerate=allow_accelerate,
        sync_batchnorm=recipe.model.sync_batchnorm,
        graphs=acceleration.graphs,
        require_graphs=recipe.execution.graphs is True,
        compile=acceleration.compile,
        label_smoothing=section.label_smoothing,
        ema_decay=section.ema.decay if section.ema is not None else None,
        ema_buffers=section.ema is not None and section.ema.use_buffers,
    )
