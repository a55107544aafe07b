"""Loads what a finished run knows about its training samples."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shards.errors import ConfigError, DataError
from shards.sample_index import SampleIndex
from trainer.config.schema import Recipe
from trainer.incv.selection_index import SelectionIndex
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import Labels, read_labels
from trainer.run.recipe import load_recipe


@dataclass(frozen=True)
class FinishedRun:
    """A run whose INCV stage has finished: its recipe, its packed training set, its labels and its selection."""

    directory: RunDirectory
    recipe: Recipe
    index: SampleIndex
    labels: Labels
    """The labels of the run, indexed by sample_id; -1 outside the run."""
    checked: npt.NDArray[np.bool_]
    """Whether the label was checked by hand (`labels.corrections`), indexed by sample_id."""
    selection: SelectionIndex


def open_run(root: Path) -> tuple[RunDirectory, Recipe]:
    """Return the run directory and its resolved recipe; raises ConfigError if `root` is not a run directory."""
    run = RunDirectory(root)
    if not run.manifest.is_file() or not run.config.is_file():
        raise ConfigError(f"{root} is not a run directory (it has no manifest.json): name the folder of an incv run")
    return run, load_recipe(run.config)


def load_finished_run(root: Path) -> FinishedRun:
    """Load a run whose INCV stage has finished; raises ConfigError or DataError that says what is missing."""
    run, recipe = open_run(root)
    if not run.selection.is_file():
        raise ConfigError(f"{root} has no selection yet: finish the run's `incv` stage first")
    folder = Path(recipe.data.train.shards)
    if not (folder / "dataset.json").is_file():
        raise DataError(
            f"the shards of the training set are not in {folder} (data.train.shards of the run): run this command "
            "in the folder in which the run was started, or copy the shards back"
        )
    index = SampleIndex.load(folder)
    selection = SelectionIndex.read(run.selection)
    if len(selection.state) != len(index):
        raise DataError(
            f"{folder} has {len(index):,} samples, but {run.selection} has {len(selection.state):,}: the shards were "
            "packed again after the run"
        )
    labels, samples = read_labels(run.labels), len(index)
    return FinishedRun(run, recipe, index, labels.by_id(samples), labels.checked_by_id(samples), selection)
