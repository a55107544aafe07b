"""Open the packed splits of a recipe: verify those that exist, and pack the others from their sources."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

from shards.errors import ConfigError, DataError, InputError
from shards.pack import pack
from shards.sample_index import SampleIndex
from shards.sources import Source, SourceOptions, find_source, open_source
from shards.verify import require_verified
from trainer.config.schema import DataConfig, Recipe
from trainer.distributed.stop import StopRequest

_log = logging.getLogger(__name__)

_NAMES_SHOWN = 5
_WORTH_PROCESSES = 20_000  # images; starting worker processes takes seconds


def open_split(
    key: str, config: DataConfig, workers: int, stop: StopRequest, max_rejected: float = 0.01
) -> SampleIndex:
    """Verify a packed split, or pack it if it does not exist; returns its index.

    key: the split's recipe key, `data.train` or `data.eval.NAME`, for error messages.
    """
    folder = Path(config.shards)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{key}.shards = {folder} is a file, not a folder of shards")
    if (folder / "dataset.json").exists():
        index = require_verified(folder, workers)
    else:
        _log.info("packing %s %s into %s", config.source, config.split, folder)
        index = _packed(key, config, workers, stop, max_rejected)
    check_matches_recipe(key, config, index)
    return index


def check_matches_recipe(key: str, config: DataConfig, index: SampleIndex) -> None:
    """Raise DataError if the folder was packed with settings that differ from the recipe's."""
    dataset = index.dataset
    pairs = {
        "source": (dataset.source, config.source),
        "split": (dataset.split, config.split),
        "resize": (dataset.resize, config.resize),
        "subset": (dataset.subset, ("all" if dataset.subset else "") if config.subset is None else config.subset),
        # null: all classes of the source
        "classes": (index.num_classes, index.num_classes if config.classes is None else config.classes),
    }
    for name, (found, asked) in pairs.items():
        if found != asked:
            raise DataError(
                f"{index.folder} holds {dataset.source} {dataset.split}, packed with {name} {_said(found)}; "
                f"the recipe asks for {_said(asked)}: "
                f"change {key}.{name}, or set {key}.shards to another folder"
            )


def _said(value: object) -> str:
    return "null" if value is None else str(value) or "''"


def _packed(key: str, config: DataConfig, workers: int, stop: StopRequest, max_rejected: float) -> SampleIndex:
    source = source_of(key, config)
    with _words_of_a_recipe(key):
        index = pack(
            source,
            Path(config.shards),
            1 if len(source) < _WORTH_PROCESSES else workers,
            max_rejected=max_rejected,
            stop=stop.requested,
            resize=config.resize,
        )
    assert index is not None, "pack() returns None only for an array task"
    return index


def source_of(key: str, config: DataConfig) -> Source:
    with _words_of_a_recipe(key):
        root = Path(config.root) if config.root else None
        options = SourceOptions(**{option.name: getattr(config, option.name) for option in fields(SourceOptions)})
        source = open_source(config.source, root, config.split, config.subset, config.classes, options)
    require_two_classes(key, source.class_names)
    return source


def require_two_classes(key: str, class_names: Sequence[str]) -> None:
    """Raise DataError if there is nothing to tell apart. key: the recipe key of the split."""
    if len(class_names) < 2:
        raise DataError(
            f"{key} has one class only, {class_names[0]!r}: at least two are needed. Check {key}.root and "
            f"{key}.split: in an image folder, the folder of the split contains one folder for each class"
        )


def find_key_root(config: DataConfig) -> str | None:
    """Return the absolute folder in which the keys of a split are the paths of its images; None if they are none."""
    with suppress(ConfigError):  # the package of a data set may be missing once its shards are packed
        if config.root and find_source(config.source).keys_are_paths:
            return os.path.abspath(config.root)
    return None


@contextmanager
def _words_of_a_recipe(key: str) -> Iterator[None]:
    """In packing errors, replace the flags of `incv shards pack` with the recipe's keys."""
    names = ["root", "split", "subset", "classes", "resize", *(option.name for option in fields(SourceOptions))]
    flags = {f"--{name.replace('_', '-')}": f"{key}.{name}" for name in names}
    flags |= {"--out": f"{key}.shards", "--max-rejected": "data.max_rejected"}
    try:
        yield
    except InputError as error:
        message = str(error)
        for flag, name in flags.items():
            message = message.replace(flag, name)
        raise type(error)(message) from error


def open_splits(recipe: Recipe, stop: StopRequest) -> tuple[SampleIndex, dict[str, SampleIndex]]:
    """Open the training split and the evaluation sets; raises DataError unless all have the same classes."""
    indices = {
        key: open_split(key, config, recipe.execution.workers, stop, recipe.data.max_rejected)
        for key, config in recipe.data.splits().items()
    }
    train = indices.pop("data.train")
    require_two_classes("data.train", train.class_names)
    sets = dict(zip(recipe.data.eval, indices.values(), strict=True))
    for name, index in sets.items():
        require_same_classes(name, train.class_names, index.class_names)
    return train, sets


def require_same_classes(name: str, train: Sequence[str], found: Sequence[str]) -> None:
    """Raise DataError that names the differences if the evaluation set `name` has other classes than `data.train`."""
    if list(train) == list(found):
        return
    differences = {
        "only in training": [one for one in train if one not in set(found)],
        f"only in {name}": [one for one in found if one not in set(train)],
    }
    shown = "; ".join(f"{where}: {_first(names)}" for where, names in differences.items() if names)
    raise DataError(
        f"the evaluation set {name} has other classes than the training set ({shown or 'in another order'}): "
        f"give both the same class folders, or choose other data for data.eval.{name}"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {len(names) - _NAMES_SHOWN} more" * (len(names) > _NAMES_SHOWN))


def load_packed_splits(recipe: Recipe) -> tuple[SampleIndex, dict[str, SampleIndex]]:
    """Load the splits that rank 0 has packed or verified; called on all other ranks."""
    return _seen(recipe.data.train), {name: _seen(config) for name, config in recipe.data.eval.items()}


def _seen(config: DataConfig) -> SampleIndex:
    folder = Path(config.shards)
    if not (folder / "dataset.json").exists():
        raise DataError(
            f"this node cannot access the shards in {folder}: put them on storage that every node mounts, or copy "
            "them to each node first (`incv shards download`)"
        )
    return SampleIndex.load(folder)
