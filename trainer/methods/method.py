"""The interface of a training method: its `Method` record, its inputs and what it builds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.config.fitting import count_steps, fit_section
from trainer.config.schema import IncvConfig, Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.loading.epoch_plan import Mixing, Schedule, StaticPlan
from trainer.loading.sample_order import Ids, build_windows, derive_stream
from trainer.methods.networks import build_module
from trainer.methods.task import BaseTask, TaskSettings
from trainer.methods.task_settings import build_task_settings
from trainer.models.weights import Weights
from trainer.passes.sample_pass import SamplePass

Input = Literal["labels", "selection", "noise_estimate"]
"""A method's inputs: the run's labels; INCV's selected and candidate samples; INCV's noise estimate."""


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
class MethodInputs:
    """Everything a method may read when it builds its task."""

    name: str
    """Name of the method."""
    recipe: Recipe
    config: Any
    """The method's own recipe section."""
    networks: int
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
    """Returns the networks of a method in `Method.reads_methods`, on the device and in eval mode."""
    weights: Weights | None = None
    """Weights that the networks start from, apart from their classifiers; None: random ones."""
    selected: Ids | None = None
    """S, the selected samples; None unless the method's inputs include `selection`."""
    candidates: Ids | None = None
    """C, the remaining candidates; None unless the method's inputs include `selection`."""
    noise: NoiseFacts | None = None
    """INCV's noise estimates; None unless the method's inputs include `selection` or `noise_estimate`."""

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
        return build_module(self.recipe, self.name, self.networks, self.classes, self.weights)

    def settings(self, plan: StaticPlan | Schedule) -> TaskSettings:
        """Build the training and execution settings for `plan`, or for a Task that plans each epoch of a schedule."""
        section = self.fit_config(plan.selected if isinstance(plan, StaticPlan) else plan.samples)
        labels = torch.from_numpy(self.labels)
        return build_task_settings(self.recipe, section, plan, labels, self.world, allow_accelerate=True)


@dataclass(frozen=True, eq=False)
class MethodTraining:
    """A method's task, ready to train."""

    task: BaseTask
    facts: dict[str, Any] = field(default_factory=dict)
    """Entries of `training.json`, besides those of the schedule or instead of them."""


@dataclass(frozen=True)
class ExpectedSizes:
    """Expected data sizes and noise, for the cost estimate before any training."""

    samples: int
    selected: int
    candidates: int
    noise: float
    incv: IncvConfig | None


@dataclass(frozen=True)
class Epochs:
    """A sequence of epochs with equal step sizes, for the cost estimate."""

    count: int
    selected: int
    """Samples of S per epoch."""
    candidates: int = 0
    ranks_first: bool = False
    """Whether each step first runs an eval-mode forward of all rows through all networks."""


@dataclass(frozen=True)
class PredictPasses:
    """Predict passes of a method outside of its steps, for the cost estimate."""

    count: int
    samples: int
    """Samples of each pass."""


def epochs_over_all(config: Any, sizes: ExpectedSizes) -> list[Epochs]:
    """Return the epochs of a method that trains on all samples in every epoch."""
    return [Epochs(config.epochs, sizes.samples)]


@dataclass(frozen=True)
class Method:
    """Describes a training method to the stages, dry run, estimate, evaluation, report and export."""

    name: str
    """Name of the method in recipes, of its stage, and of its folder in the run directory."""
    title: str
    """Name of the method in the report."""
    section: type[TrainingConfig]
    """Type of the method's recipe section, whose key is `name`."""
    build: Callable[[MethodInputs], MethodTraining]
    networks: int = 1
    """Number of networks: 1, or 2 for a TwinModel."""
    inputs: Callable[[Recipe], frozenset[Input]] = lambda recipe: frozenset({"labels"})
    """Returns the inputs that the method needs under a recipe."""
    passes: Callable[[Any, ExpectedSizes], Sequence[Epochs]] = epochs_over_all
    """Called with (section, sizes); returns the method's epochs for the cost estimate."""
    predict_passes: Callable[[Any, ExpectedSizes], Sequence[PredictPasses]] = lambda config, sizes: ()
    """Called with (section, sizes); returns the method's own predict passes for the cost estimate."""
    reads_methods: tuple[str, ...] = ()
    """Names of methods that the recipe must list too, because this method reads the networks that they trained."""
    reads_features: bool = False
    """Whether the method reads the output of the penultimate layer, which not every network gives."""
    inherits: str | None = None
    """Name of another recipe section that supplies the values of keys that are unset in this one."""
    validate: Callable[[Recipe], None] = lambda recipe: None
    """Raises ValueError, naming the keys, if the recipe contradicts itself."""
    validate_rows: Callable[[Recipe, int], None] = lambda recipe, ranks: None
    """Called with (recipe, ranks); raises ConfigError if batch.micro is too small for a rank's rows of a step."""
    supports_mixup: bool = False
    """Whether the method's Task trains on mixed images; not if it chooses samples."""
    is_reference: bool = False
    """Whether this is the report's baseline."""
    is_headline: bool = False
    """Whether the report's headline is about this method, if the run trained it; of several, about the first."""
    numerics: int = 1
    """Version of the method's numbers. Raise it with a change that gives other results for the same result keys:
    recorded runs of an older version are then stale."""

    def config(self, recipe: Recipe) -> Any:
        """Return the method's section of a recipe that lists the method."""
        return recipe.section(self.name)

    def reads_incv(self, recipe: Recipe) -> bool:
        return not self.inputs(recipe) <= {"labels"}

    def reads_selection(self, recipe: Recipe) -> bool:
        return "selection" in self.inputs(recipe)
