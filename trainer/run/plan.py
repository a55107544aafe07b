"""What a run is asked to do, what rank 0 plans from it, and what identifies one start of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import Recipe
from trainer.records.run_directory import RunDirectory
from trainer.run.recipe import check_recipe


@dataclass(frozen=True)
class RunOptions:
    """The recipe, the run directory and the command-line options of a run."""

    recipe: Recipe
    name: str
    run: RunDirectory
    redo: Sequence[str] = ()
    only: str | None = None
    """The only stage to run; None: all stages."""
    profile: bool = False
    """`summary`: measure the phases of each training; `trace`: also trace a few steps; None: neither."""
    check_source: bool = False
    """Whether to compare a large source with what was packed from it; a small one is always compared."""
    incv_from: Path | None = None
    """The directory of a run whose finished INCV stage this run takes over; None: it runs INCV itself."""
    command: str | None = None
    """The command that executes this run alone, which the manifest records; None: the one that was typed."""


@dataclass(frozen=True)
class RunPlan:
    """What rank 0 decides when it has opened the data; equal on all ranks."""

    recipe: Recipe
    """With the folders of the packed splits, and numbers for the keys that depend on the size of the data."""
    weights: Path | None
    """The file of the initial weights; None: networks start from random ones."""

    def to_json(self) -> dict[str, Any]:
        weights = None if self.weights is None else str(self.weights)
        return {"recipe": self.recipe.model_dump(mode="json", by_alias=True), "weights": weights}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RunPlan":
        weights = content["weights"]
        return cls(check_recipe(content["recipe"], "the plan of rank 0"), None if weights is None else Path(weights))


@dataclass(frozen=True)
class RunStart:
    """What rank 0 knows of this start once it has locked the run directory; equal on all ranks."""

    number: int
    identities: dict[str, str]
    """The hash of the result keys of each stage, which identifies its checkpoints."""
    incv_from: dict[str, Any] | None
    """The manifest's note of a run whose INCV stage is taken over; None: INCV runs here."""
