"""Open the packed splits of a recipe: verify those that exist, and pack the others from their sources."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from shards.errors import ConfigError, DataError, Fix, list_some, renamed_fields
from shards.pack import PackOptions, can_resume, find_plan_difference, is_packed, pack, require_ours
from shards.plan import Plan
from shards.repacked import is_packed_again, latest_folder, list_folders, next_folder, set_latest_folder
from shards.sample_index import SampleIndex
from shards.source_files import find_changes, read_source_files
from shards.sources import Source, SourceOptions, find_source, open_source
from shards.verify import require_verified
from trainer.config.data import DataConfig
from trainer.config.recipe_file import read_recipe
from trainer.config.schema import Recipe
from trainer.distributed.stop import StopRequest
from trainer.records.run_directory import RunDirectory
from trainer.run.source_check import SourceCheck, has_files

_log = logging.getLogger(__name__)

_NAMES_SHOWN = 5
_WORTH_PROCESSES = 20_000  # images; starting worker processes takes seconds


def open_split(
    key: str,
    config: DataConfig,
    workers: int,
    stop: StopRequest,
    *,
    folder: Path | None = None,
    max_rejected: float = 0.01,
    redo: bool = False,
    check_source: bool = False,
) -> SampleIndex:
    """Verify a packed split, or pack it if it does not exist; returns its index, which may be in FOLDER-2, ...

    key: the split's recipe key, `data.train` or `data.eval.NAME`, for error messages; folder: where it is packed, if
    not in the latest folder; redo: pack it into a new folder unless one is up to date; check_source: compare a large
    source too.
    """
    base = Path(config.shards)
    if base.exists() and not base.is_dir():
        raise DataError(f"{base} is a file, not a folder of shards", field=f"{key}.shards")
    folder = find_folder_to_redo(key, config) if redo else folder or latest_folder(base)
    if is_packed(folder):
        index = require_verified(folder, workers)
        check_matches_recipe(key, config, index)
        check_files(key, config, check_source).require_current(index)
    else:
        _log.info("packing %s into %s", " ".join(filter(None, (config.source, config.split))), folder)
        index = _pack_split(key, config, folder, workers, stop, max_rejected)
        check_matches_recipe(key, config, index)
    if redo and folder != latest_folder(base):
        set_latest_folder(base, folder)
    return index


def find_folder_to_redo(key: str, config: DataConfig) -> Path:
    """Return the folder for `--redo pack`: one that is up to date, the latest if it is unfinished, or a free one."""
    base = Path(config.shards)
    latest, folders = latest_folder(base), list_folders(base)
    if not any(map(is_packed, folders)):
        return latest
    source = source_of(key, config)
    with renamed_fields(option_keys(key)):
        for folder in filter(is_packed, folders):
            if _is_current(config, source, folder):
                _log.info("%s: %s is up to date and is not packed again", key, folder)
                return folder
        plan = _plan_like(source, config)
    if not is_packed(latest):
        return latest
    unfinished = (folder for folder in folders if not is_packed(folder) and can_resume(folder, plan))
    return next(unfinished, next_folder(base))


def _plan_like(source: Source, config: DataConfig) -> Plan:
    return PackOptions(resize=config.resize).plan(source)


def _is_current(config: DataConfig, source: Source, folder: Path) -> bool:
    """Whether the folder holds what packing the source as the recipe asks would give."""
    try:
        index = SampleIndex.load(folder)
        same = find_plan_difference(index.dataset, _plan_like(source, config)) is None
        if not same or not has_files(config):
            return same
        recorded = read_source_files(folder, index.dataset)
    except DataError:  # damaged
        return False
    return recorded is not None and not find_changes(source, index, recorded)


def check_matches_recipe(key: str, config: DataConfig, index: SampleIndex) -> None:
    """Raise ConfigError if the folder was packed with settings that differ from the recipe's."""
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
            raise ConfigError(
                f"{index.folder} holds {dataset.source} {dataset.split}, packed with {name} {_show_value(found)}; "
                f"the recipe asks for {_show_value(asked)}",
                fix=[
                    Fix("change {}", f"{key}.{name}"),
                    Fix("set {} to another folder (or leave it out)", f"{key}.shards"),
                    "add `--redo pack` to pack into a new one",
                ],
            )


def _show_value(value: object) -> str:
    return "null" if value is None else str(value) or "''"


def _pack_split(
    key: str, config: DataConfig, folder: Path, workers: int, stop: StopRequest, max_rejected: float
) -> SampleIndex:
    source = source_of(key, config)
    is_small = len(source) < _WORTH_PROCESSES  # of a large set, finished shards are kept, so that packing can resume
    with renamed_fields(option_keys(key)):
        options = PackOptions(
            workers=1 if is_small else workers,
            max_rejected=max_rejected,
            resize=config.resize,
            wait_for_lock=True,
            keep_unfinished=not is_small,
            stop=stop.requested,
        )
        return pack(source, folder, options)


def source_of(key: str, config: DataConfig) -> Source:
    with renamed_fields(option_keys(key)):
        root = Path(config.root) if config.root else None
        options = SourceOptions(**{option.name: getattr(config, option.name) for option in fields(SourceOptions)})
        source = open_source(config.source, root, config.split, config.subset, config.classes, options)
    if key == "data.train":  # an evaluation set has the same classes, or is only searched for training images
        require_two_classes(key, source.class_names)
    return source


def require_two_classes(key: str, class_names: Sequence[str]) -> None:
    """Raise DataError if there is nothing to tell apart. key: the recipe key of the split."""
    if len(class_names) < 2:
        raise DataError(
            f"{key} has one class only, {class_names[0]!r}: at least two are needed. Check {key}.root and "
            f"{key}.split: in an image folder, the folder of the split contains one folder for each class"
        )


def check_files(key: str, config: DataConfig, large: bool) -> SourceCheck:
    """Return the comparison of a split's source with what was packed from it. large: compare many files too."""

    def open_classes(classes: int | None) -> Source:
        return source_of(key, config.model_copy(update={"classes": classes}))

    return SourceCheck(key, config, open_classes, large)


def find_key_root(config: DataConfig) -> str | None:
    """Return the absolute folder in which the keys of a split are the paths of its images; None if they are none."""
    with suppress(ConfigError):  # the package of a data set may be missing once its shards are packed
        if config.root and find_source(config.source).keys_are_paths:
            return os.path.abspath(config.root)
    return None


def option_keys(key: str) -> dict[str, str]:
    """Return the recipe key of each option of packing. key: the recipe key of the split."""
    names = ["root", "split", "subset", "classes", "resize", *(option.name for option in fields(SourceOptions))]
    others = {"out": f"{key}.shards", "max_rejected": "data.max_rejected", "workers": "execution.workers"}
    return {name: f"{key}.{name}" for name in names} | others


def require_own_folder(key: str, config: DataConfig) -> None:
    """Raise DataError if the split would be packed into a folder that holds anything else."""
    with renamed_fields(option_keys(key)):
        require_ours(Path(config.shards))


def open_splits(
    recipe: Recipe, stop: StopRequest, run: RunDirectory | None = None, redo: bool = False, check_source: bool = False
) -> tuple[SampleIndex, dict[str, SampleIndex]]:
    """Open the training split and the evaluation sets; raises DataError unless all have the same classes.

    run: the run directory, which records the folders it was started with; redo: pack what has changed again.
    """
    folders = find_folders(recipe, run)
    indices = {
        key: open_split(
            key,
            config,
            recipe.execution.workers,
            stop,
            folder=folders[key],
            max_rejected=recipe.data.max_rejected,
            redo=redo,
            check_source=check_source,
        )
        for key, config in recipe.data.splits().items()
    }
    train = indices.pop("data.train")
    require_two_classes("data.train", train.class_names)
    sets = dict(zip(recipe.data.eval, indices.values(), strict=True))
    for name, index in sets.items():
        if recipe.incv is not None and name == recipe.incv.against and not recipe.methods:
            continue
        require_same_classes(name, train.class_names, index.class_names)
    return train, sets


def find_folders(recipe: Recipe, run: RunDirectory | None) -> dict[str, Path]:
    """Return the folder of each split: the one that the run was started with, else the latest.

    Another run may have packed the source again since then.
    """
    recorded = _read_folders(run) if run is not None else {}
    folders = {}
    for key, config in recipe.data.splits().items():
        base, own = Path(config.shards), recorded.get(key)
        is_ours = own is not None and (own == base or is_packed_again(base, own)) and is_packed(own)
        folders[key] = own if own is not None and is_ours else latest_folder(base)
    return folders


def _read_folders(run: RunDirectory) -> dict[str, Path]:
    """Return the folders in config.resolved.yaml of a run, by recipe key; empty if the run has not begun."""
    try:
        data = read_recipe(run.config)["data"]
        splits = {"data.train": data["train"]} | {f"data.eval.{name}": one for name, one in data["eval"].items()}
        return {key: Path(split["shards"]) for key, split in splits.items()}
    except (ConfigError, KeyError, TypeError, AttributeError):
        return {}


def name_folders(train: SampleIndex, eval_sets: Mapping[str, SampleIndex]) -> dict[str, str]:
    """Return the folder of each opened split, by recipe key."""
    return {"data.train": str(train.folder)} | {f"data.eval.{name}": str(i.folder) for name, i in eval_sets.items()}


def with_folders(recipe: Recipe, folders: Mapping[str, str]) -> Recipe:
    """Return the recipe with these folders as its `shards` keys. folders: by recipe key."""

    def place(key: str, config: DataConfig) -> DataConfig:
        same = Path(config.shards) == Path(folders[key])
        return config if same else config.model_copy(update={"shards": folders[key]})

    evaluation = {name: place(f"data.eval.{name}", config) for name, config in recipe.data.eval.items()}
    data = recipe.data.model_copy(update={"train": place("data.train", recipe.data.train), "eval": evaluation})
    return recipe.model_copy(update={"data": data})


def pack_arguments(split: DataConfig, max_rejected: float) -> list[str]:
    """Return the arguments of `incv shards pack` that create this split."""
    names = ("root", "split", "subset", "classes", "resize", "csv", "path_column", "label_column")
    options = {name.replace("_", "-"): getattr(split, name) for name in names} | {"max-rejected": max_rejected}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    switches = [f"--{name.replace('_', '-')}" for name in ("partial", "allow_outside") if getattr(split, name)]
    return [split.source, f"--out={split.shards}", *given, *switches]


def require_same_classes(name: str, train: Sequence[str], found: Sequence[str]) -> None:
    """Raise DataError that names the differences if the evaluation set `name` has other classes than `data.train`."""
    if list(train) == list(found):
        return
    differences = {
        "only in training": [one for one in train if one not in set(found)],
        f"only in {name}": [one for one in found if one not in set(train)],
    }
    shown = "; ".join(f"{where}: {list_some(names, _NAMES_SHOWN)}" for where, names in differences.items() if names)
    raise DataError(
        f"the evaluation set {name} has different classes than the training set ({shown or 'in another order'}): "
        f"give both the same class folders, or choose other data for data.eval.{name}"
    )


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
