"""The checks of a run that need no data: `incv validate` makes them, so that a start does not fail on them."""

from pathlib import Path

from shards.errors import ConfigError
from shards.sources import find_source
from trainer.config.schema import Recipe
from trainer.records.trackers import require_trackers
from trainer.run.initial_weights import find_weights
from trainer.run.label_file import file_checksum
from trainer.run.network_check import check_network
from trainer.run.noise_kinds import build_transition
from trainer.run.preflight import check_rows

_ANY_CLASSES = 10  # if the number is unknown until the data are read; networks take any number


def check_without_data(recipe: Recipe) -> None:
    """Raise InputError if a run of this recipe would be refused on any machine and with any data.

    Checks sources, label files, initial weights, network and optimisers; downloads nothing.
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
    check_network(recipe, classes or _ANY_CLASSES, find_weights(recipe.model, download=False))
