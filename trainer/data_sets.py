"""The packed splits of a recipe: found and checked, or packed from their sources."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.errors import DataError, InputError
from shards.pack import pack
from shards.sample_index import SampleIndex
from shards.sources import Source, open_source
from shards.verify import require_verified
from trainer.config import DataConfig, Recipe
from trainer.stop_request import StopRequest

_WORTH_PROCESSES = 20_000  # images; starting worker processes takes seconds


def open_split(key: str, config: DataConfig, workers: int, stop: StopRequest) -> SampleIndex:
    """The split's index; packs it where its folder does not exist, checks it where it does.

    key: where the recipe says it, `data.train` or `data.eval.NAME`, for the errors.
    """
    folder = Path(config.shards)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{key}.shards = {folder} is a file, not a folder of shards")
    if (folder / "dataset.json").exists():
        index = require_verified(folder, workers)
    else:
        print(f"packing {config.source} {config.split} into {folder}", file=sys.stderr)
        index = _packed(key, config, workers, stop)
    found = (index.dataset.source, index.dataset.split)
    if found != (config.source, config.split):
        raise DataError(
            f"{folder} holds {found[0]} {found[1]}, the recipe asks for {config.source} {config.split}: "
            f"change {key}.shards to another folder"
        )
    return index


def _packed(key: str, config: DataConfig, workers: int, stop: StopRequest) -> SampleIndex:
    source = source_of(key, config)
    with _words_of_a_recipe(key):
        return pack(
            source, Path(config.shards), 1 if len(source) < _WORTH_PROCESSES else workers, stop=stop.requested
        )


def source_of(key: str, config: DataConfig) -> Source:
    with _words_of_a_recipe(key):
        return open_source(config.source, Path(config.root) if config.root else None, config.split)


@contextmanager
def _words_of_a_recipe(key: str) -> Iterator[None]:
    """Errors of packing speak of the flags of `incv shards pack`; a recipe has keys instead."""
    flags = {"--root": f"{key}.root", "--out": f"{key}.shards", "--split": f"{key}.split"}
    try:
        yield
    except InputError as error:
        said = str(error)
        for flag, name in flags.items():
            said = said.replace(flag, name)
        raise type(error)(said) from error


def open_splits(recipe: Recipe, stop: StopRequest) -> tuple[SampleIndex, dict[str, SampleIndex]]:
    """The training split and the evaluation sets, all with the same classes."""
    workers = recipe.execution.workers
    train = open_split("data.train", recipe.data.train, workers, stop)
    sets = {name: open_split(f"data.eval.{name}", config, workers, stop) for name, config in recipe.data.eval.items()}
    for name, index in sets.items():
        if index.class_names != train.class_names:
            raise DataError(
                f"evaluation set {name} ({index.folder}) has other classes than the training set ({train.folder})"
            )
    return train, sets
