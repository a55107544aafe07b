"""The record of a training method: what recipe, stages, estimate and report know of it, without importing torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from trainer.config.schema import IncvConfig, Recipe, TrainingConfig

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from trainer.methods.inputs import MethodInputs, MethodTraining

Inputs = tuple[str, ...]
_OF_INCV = ("selection", "noise_estimate")


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
class Method:
    """Describes a training method to the stages, dry run, estimate, evaluation, report and export."""

    name: str
    """Name of the method in recipes, of its stage, and of its folder in the run directory."""
    title: str
    """Name of the method in the report."""
    section: type[TrainingConfig]
    """Type of the method's recipe section, whose key is `name`."""
    builder: str
    """The function that builds the Task from MethodInputs, `module:function`; imported when the training starts."""
    networks: int = 1
    """Number of networks: 1, or 2 for a TwinModel."""
    inputs: Inputs | Callable[[Recipe], Inputs] = ()
    """What the method reads besides the labels, always or under a recipe.

    `selection`: INCV's selected and candidate samples; `noise_estimate`: INCV's noise estimates; `features`: the
    output of the penultimate layer, which not every network gives; or the name of another method, whose trained
    networks it then gets: the recipe must list that method too.
    """
    epochs: Callable[[Any, ExpectedSizes], Sequence[Epochs]] | None = None
    """Called with (section, sizes); returns the epochs for the cost estimate. None: all epochs on the selected
    samples if the method reads the selection, else on all samples."""
    passes_before: int = 0
    """Predict passes over all samples before the training, for the cost estimate."""
    passes_per_epoch: float | Callable[[Any, ExpectedSizes], float] = 0.0
    """Predict passes over all samples per epoch, as a number or from (section, sizes), for the cost estimate."""
    inherits: str | None = None
    """Name of another recipe section that supplies the values of keys that are unset in this one."""
    validate: Callable[[Recipe], None] = lambda recipe: None
    """Raises ValueError, naming the keys, if the recipe contradicts itself."""
    validate_rows: Callable[[Recipe, int], None] = lambda recipe, ranks: None
    """Called with (recipe, ranks); raises ConfigError if batch.micro is too small for a rank's rows of a step."""
    supports_mixup: bool = False
    """Whether the method's Task trains on mixed images; not if it chooses samples."""
    role: Literal["reference", "headline"] | None = None
    """reference: the report's baseline; headline: the report's headline is about this method, if the run trained it,
    or about the first of several."""
    numerics: int = 1
    """Version of the method's numbers. Raise it with a change that gives other results for the same result keys:
    recorded runs of an older version are then stale."""

    def build(self, inputs: "MethodInputs") -> "MethodTraining":
        """Build the method's Task and plan."""
        module, _, function = self.builder.partition(":")
        training: MethodTraining = getattr(import_module(module), function)(inputs)
        return training

    def config(self, recipe: Recipe) -> Any:
        """Return the method's section of a recipe that lists the method."""
        return recipe.section(self.name)

    def reads(self, recipe: Recipe) -> Inputs:
        """Return what the method reads besides the labels under a recipe."""
        return self.inputs(recipe) if callable(self.inputs) else self.inputs

    def reads_selection(self, recipe: Recipe) -> bool:
        return "selection" in self.reads(recipe)

    def reads_incv(self, recipe: Recipe) -> bool:
        return any(name in _OF_INCV for name in self.reads(recipe))

    def reads_features(self, recipe: Recipe) -> bool:
        return "features" in self.reads(recipe)

    def reads_methods(self, recipe: Recipe) -> Inputs:
        """Return the names of the methods whose trained networks this one reads."""
        return tuple(name for name in self.reads(recipe) if name not in (*_OF_INCV, "features"))

    def expect_epochs(self, recipe: Recipe, config: Any, sizes: ExpectedSizes) -> Sequence[Epochs]:
        """Return the epochs for the cost estimate. config: the method's section, with fitted epochs."""
        if self.epochs is not None:
            return self.epochs(config, sizes)
        return [Epochs(config.epochs, sizes.selected if self.reads_selection(recipe) else sizes.samples)]

    def expect_passes(self, config: Any, sizes: ExpectedSizes) -> list[tuple[int, int]]:
        """Return (passes, samples of each) of the method's own predict passes, for the cost estimate."""
        share = self.passes_per_epoch(config, sizes) if callable(self.passes_per_epoch) else self.passes_per_epoch
        found = [(self.passes_before, sizes.samples), (config.epochs, round(share * sizes.samples))]
        return [(passes, samples) for passes, samples in found if passes and samples]
