"""Finds out whether the source of a packed split has changed since it was packed."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from shards.errors import ConfigError, InputError
from shards.sample_index import SampleIndex
from shards.source_files import MOST_COMPARED, SourceFiles, find_changes, read_source_files
from shards.sources import find_source, open_source
from trainer.config.schema import DataConfig

_log = logging.getLogger(__name__)


def require_current(key: str, config: DataConfig, index: SampleIndex, check_source: bool) -> None:
    """Raise ConfigError that says what changed, if the source no longer has the files that were packed.

    key: the split's recipe key, for the error; check_source: compare a large source too.
    """
    difference = find_difference(key, config, index, check_source)
    if difference is not None:
        raise ConfigError(
            f"{difference}. Add `--redo pack` to pack the images of {key}.root into a new folder (the old one is "
            f"kept), or set {key}.root to null to continue with the images as they were packed"
        )


def find_difference(key: str, config: DataConfig, index: SampleIndex, check_source: bool) -> str | None:
    """Return how the source differs from what was packed; None if it does not, or if that cannot be found out."""
    if config.root is None or not has_files(config):
        return None
    root = Path(config.root)
    if not _is_present(root):
        _log.info("%s.root = %s is not on this machine: %s is used as it was packed", key, root, index.folder)
        return None
    recorded = read_source_files(index.folder, index.dataset)
    is_elsewhere = recorded is not None and Path(recorded.root) != root.resolve()
    if len(index) > MOST_COMPARED and not check_source:
        if recorded is not None and is_elsewhere:
            return (
                f"{index.folder} was packed from {recorded.root}, not from {key}.root = {root}, and its "
                f"{len(index):,} files are compared only with --check-source: add it if they are the same files"
            )
        _log.info("%s: %s files are not compared with %s (--check-source does)", key, f"{len(index):,}", index.folder)
        return None
    changed = _describe_changes(config, index, recorded)
    if changed is None:
        if is_elsewhere:
            _log.info("%s: %s has the same files as when it was packed, elsewhere", key, root)
        return None
    if recorded is None:
        _log.warning("%s: %s; they are not used, unless you add `--redo pack`", key, changed)
        return None
    if is_elsewhere:
        return f"{index.folder} was packed from {recorded.root}, and {key}.root = {root} has other files: {changed}"
    return f"{key}.root = {root} has changed since it was packed into {index.folder}: {changed}"


def has_files(config: DataConfig) -> bool:
    """Whether the files of this source can be compared with what was packed."""
    with suppress(ConfigError):  # the package of a data set may be missing once its shards are packed
        return find_source(config.source).has_files
    return False


def _describe_changes(config: DataConfig, index: SampleIndex, recorded: SourceFiles | None) -> str | None:
    """Compare all files; without a record of them, only keys and labels. None: nothing has changed."""
    classes = config.classes
    if classes is None and recorded is not None:
        classes = recorded.first_classes
    root = Path(config.root) if config.root else None
    try:
        source = open_source(config.source, root, config.split, subset=config.subset, classes=classes)
    except InputError as error:
        return f"it can no longer be packed ({error})"
    changes = find_changes(source, index, recorded)
    if recorded is None and not changes:
        _log.info(
            "%s was packed by an earlier version, which did not record its files: files with a new content are not "
            "noticed",
            index.folder,
        )
    return changes.describe() if changes else None


def _is_present(root: Path) -> bool:
    """Whether the folder is on this machine; an empty one is taken for a mount point without its storage."""
    with suppress(OSError), os.scandir(root) as entries:
        return next(entries, None) is not None
    return False
