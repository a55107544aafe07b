"""The checks of a run that need no data: `incv validate` makes them, so that a start does not fail on them."""

from pathlib import Path

from shards.errors import ConfigError
from shards.pack import is_packed
from shards.sources import find_source
from trainer.config.schema import Recipe
from trainer.models.weights import Weights
from trainer.records.run_directory import RunDirectory
from trainer.records.trackers import require_trackers
from trainer.run.data_sets import find_folders
from trainer.run.initial_weights import find_weights
from trainer.run.label_file import file_checksum
from trainer.run.network_check import check_network
from trainer.run.noise_kinds import build_transition
from trainer.run.preflight import check_rows

_ANY_CLASSES = 10  # if the number is unknown until the data are read; networks take any number


def check_before_packing(recipe: Recipe, run: RunDirectory, weights: Weights | None) -> None:
    """If there is something to pack, raise InputError for what would be refused after it. weights: as found."""
    if all(is_packed(folder) for folder in find_folders(recipe, run).values()):
        return
    run.require_writable()
    check_without_data(recipe, weights)


def check_without_data(recipe: Recipe, weights: Weights | None = None) -> None:
    """Raise InputError if a run of this recipe would be refused on any machine and with any data.

    Checks sources, label files, initial weights, network and optimisers; downloads nothing. weights: the initial
    weights, if they have been read already.
    """
    require_trackers(recipe.execution.trackers)
    for split in (recipe.data.train, *recipe.data.eval.values()):
        find_source(split.source)
    for key in ("file", "corrections"):
        path = getattr(recipe.labels, key)
        if path is not None:
            file_checksum(Path(path), f"labels.{key}")
    classes, world, batch = recipe.data.train.classes, recipe.execution.world, recipe.batch.global_
    if classes is not None:
        build_transition(recipe.labels, classes)
    if world is not None and batch != "auto":  # auto is known only with the data
        if world > batch:
            raise ConfigError(
                f"execution.world = {world} processes cannot share batch.global = {batch} rows: some have none; "
                "lower execution.world, or raise batch.global"
            )
        check_rows(recipe, world)
    if weights is None:
        weights = find_weights(recipe.model, download=False)
    check_network(recipe, classes or _ANY_CLASSES, weights)
