"""What a training method tells the rest of the program about itself, and what it is given to train with."""

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
"""What a method reads: the labels of the run; INCV's selected and candidate samples; INCV's noise estimate."""


@dataclass(frozen=True)
class NoiseFacts:
    """What INCV found out about the noise."""

    ratio: float
    """ε, by the estimate that `incv.noise_estimate` names."""
    selected_confident: float
    """ε_S, the noise of the selected samples, by the confident estimate of T (Prop. 2)."""


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """Everything a method may read when it builds its task."""

    name: str
    """The method's."""
    recipe: Recipe
    config: Any
    """The method's own recipe section."""
    networks: int
    classes: int
    samples: Ids
    """All samples of the run."""
    shards: npt.NDArray[np.integer]
    """The shard of each sample: dense, by sample_id."""
    world: World
    selected: Ids | None = None
    """None unless the method's inputs include `selection`; so with `candidates`."""
    candidates: Ids | None = None
    noise: NoiseFacts | None = None
    """None unless the method's inputs include `selection` or `noise_estimate`."""

    def plan(self, selected: Ids, candidates: Ids | None = None, candidates_from: int = 0) -> TrainingPlan:
        """The steps of the training: `config.epochs` epochs over `selected`, and over C from an epoch on."""
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
        """How the recipe wants this training optimised and executed."""
        optimizer = self.config.optimizer
        return build_task_settings(self.recipe, optimizer, plan, self.world, allow_accelerate=True)


@dataclass(frozen=True, eq=False)
class MethodTraining:
    """A method ready to train."""

    task: BaseTask
    plan: TrainingPlan
    facts: dict[str, Any] = field(default_factory=dict)
    """What `training.json` records besides the sizes of the plan."""


@dataclass(frozen=True)
class ExpectedSizes:
    """What an estimate expects of the data, before anything has been trained."""

    samples: int
    selected: int
    candidates: int
    noise: float
    incv: IncvConfig | None


@dataclass(frozen=True)
class Epochs:
    """Epochs of equal shape, for the estimate of a training's cost."""

    count: int
    selected: int
    """Samples that make an epoch."""
    candidates: int = 0
    ranks_first: bool = False
    """Whether every row passes through all networks in eval mode before the step."""


def epochs_over_all(config: Any, sizes: ExpectedSizes) -> list[Epochs]:
    """Every epoch sees every sample of the run."""
    return [Epochs(config.epochs, sizes.samples)]


@dataclass(frozen=True)
class Method:
    """A training method as the rest of the program sees it: stages, dry run, estimate, evaluation, report, export."""

    name: str
    """In recipes, as a stage, and as a folder of the run directory."""
    title: str
    """In the report."""
    section: type[TrainingConfig]
    """The type of its recipe section, which has its name."""
    build: Callable[[MethodInputs], MethodTraining]
    networks: int = 1
    """1, or 2 for a TwinModel."""
    inputs: Callable[[Recipe], frozenset[Input]] = lambda recipe: frozenset({"labels"})
    """What it reads under this recipe."""
    passes: Callable[[Any, ExpectedSizes], Sequence[Epochs]] = epochs_over_all
    """(section, sizes): its epochs, for the estimate."""
    inherits: str | None = None
    """Another section, whose values stand in for keys that the recipe leaves unset in this one."""
    validate: Callable[[Recipe], None] = lambda recipe: None
    """Raise ValueError, naming the keys, where the recipe contradicts itself."""
    validate_rows: Callable[[Recipe, int], None] = lambda recipe, ranks: None
    """(recipe, ranks): raise ConfigError where a rank cannot hold its rows of a step at once."""
    is_reference: bool = False
    """Whether the report compares the other methods with this one."""
    is_headline: bool = False
    """Whether the report's headline is about this method, where a run has trained it."""

    def config(self, recipe: Recipe) -> Any:
        """Its section of a recipe that lists it."""
        return recipe.section(self.name)

    def reads_incv(self, recipe: Recipe) -> bool:
        return not self.inputs(recipe) <= {"labels"}

    def reads_selection(self, recipe: Recipe) -> bool:
        return "selection" in self.inputs(recipe)
