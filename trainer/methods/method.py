"""The interface of a training method: its `Method` record, its inputs and what it builds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from trainer.config.schema import IncvConfig, Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids, TrainingPlan, build_windows, derive_stream
from trainer.methods.networks import build_module
from trainer.methods.task import BaseTask, TaskSettings, build_task_settings

Input = Literal["labels", "selection", "noise_estimate"]
"""A method's inputs: the run's labels; INCV's selected and candidate samples; INCV's noise estimate."""


@dataclass(frozen=True)
class NoiseFacts:
    """INCV's noise estimates."""

    ratio: float
    """ε, by the estimator named in `incv.noise_estimate`."""
    selected_confident: float
    """ε_S, the noise ratio of the selected samples, from the confident estimate of T (Prop. 2)."""


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """Everything a method may read when it builds its task."""

    name: str
    """Of the method."""
    recipe: Recipe
    config: Any
    """The method's own recipe section."""
    networks: int
    classes: int
    samples: Ids
    """All samples of the run."""
    shards: npt.NDArray[np.integer]
    """The shard of each sample, indexed by sample_id."""
    world: World
    selected: Ids | None = None
    """None unless the method's inputs include `selection`; likewise `candidates`."""
    candidates: Ids | None = None
    noise: NoiseFacts | None = None
    """None unless the method's inputs include `selection` or `noise_estimate`."""

    def plan(self, selected: Ids, candidates: Ids | None = None, candidates_from: int = 0) -> TrainingPlan:
        """The training plan: `config.epochs` epochs over `selected`, joined by C from epoch `candidates_from`."""
        plan = TrainingPlan(
            stream=derive_stream(self.recipe.seed, self.name),
            selected=selected,
            batch=self.recipe.batch.global_,
            epochs=self.config.epochs,
            windows=build_windows(self.recipe.order, self.shards),
        )
        if candidates is None:
            return plan
        return replace(plan, candidates=candidates, candidates_from=candidates_from)

    def module(self) -> nn.Module:
        """The method's networks with their initial weights: one network, or a TwinModel."""
        return build_module(self.recipe, self.name, self.networks, self.classes)

    def settings(self, plan: TrainingPlan) -> TaskSettings:
        """Optimiser and execution settings from the recipe."""
        optimizer = self.config.optimizer
        return build_task_settings(self.recipe, optimizer, plan, self.world, allow_accelerate=True)


@dataclass(frozen=True, eq=False)
class MethodTraining:
    """A method ready to train."""

    task: BaseTask
    plan: TrainingPlan
    facts: dict[str, Any] = field(default_factory=dict)
    """Extra entries for `training.json`, besides the sizes of the plan."""


@dataclass(frozen=True)
class ExpectedSizes:
    """Expected data sizes and noise, for an estimate before any training."""

    samples: int
    selected: int
    candidates: int
    noise: float
    incv: IncvConfig | None


@dataclass(frozen=True)
class Epochs:
    """Epochs of equal shape, for the cost estimate."""

    count: int
    selected: int
    """Samples per epoch."""
    candidates: int = 0
    ranks_first: bool = False
    """Whether each step first runs an eval-mode forward of all rows through all networks."""


def epochs_over_all(config: Any, sizes: ExpectedSizes) -> list[Epochs]:
    """All epochs run over all samples."""
    return [Epochs(config.epochs, sizes.samples)]


@dataclass(frozen=True)
class Method:
    """What stages, dry run, estimate, evaluation, report and export know about a training method."""

    name: str
    """Its name in recipes, as a stage and as a folder of the run directory."""
    title: str
    """Its name in the report."""
    section: type[TrainingConfig]
    """Type of its recipe section, whose key is `name`."""
    build: Callable[[MethodInputs], MethodTraining]
    networks: int = 1
    """1, or 2 for a TwinModel."""
    inputs: Callable[[Recipe], frozenset[Input]] = lambda recipe: frozenset({"labels"})
    """Its inputs under a recipe."""
    passes: Callable[[Any, ExpectedSizes], Sequence[Epochs]] = epochs_over_all
    """(section, sizes): its epochs, for the estimate."""
    inherits: str | None = None
    """Another section that supplies the values of keys unset in this one."""
    validate: Callable[[Recipe], None] = lambda recipe: None
    """Raises ValueError, naming the keys, if the recipe contradicts itself."""
    validate_rows: Callable[[Recipe, int], None] = lambda recipe, ranks: None
    """(recipe, ranks): raises ConfigError if a rank's rows of a step do not fit in one micro-batch."""
    is_reference: bool = False
    """Whether this is the report's baseline."""
    is_headline: bool = False
    """Whether the report's headline is about this method, if the run trained it."""

    def config(self, recipe: Recipe) -> Any:
        """Its section of a recipe that lists it."""
        return recipe.section(self.name)

    def reads_incv(self, recipe: Recipe) -> bool:
        return not self.inputs(recipe) <= {"labels"}

    def reads_selection(self, recipe: Recipe) -> bool:
        return "selection" in self.inputs(recipe)
