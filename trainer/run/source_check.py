"""Finds out whether the source of a packed split has changed since it was packed."""

import logging
import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shards.errors import ConfigError, Fix, InputError
from shards.sample_index import SampleIndex
from shards.source_files import MOST_COMPARED, SourceFiles, find_changes, read_source_files
from shards.sources import Source, find_source
from trainer.config.data import DataConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceCheck:
    """How to compare the source of one split with what was packed from it."""

    key: str
    """The split's recipe key, for messages."""
    config: DataConfig
    open_source: Callable[[int | None], Source]
    """Opens the source, or its first classes if a number is given."""
    large: bool = False
    """Compare more than MOST_COMPARED files too."""

    def require_current(self, index: SampleIndex) -> None:
        """Raise ConfigError, which says what changed, if the source no longer has the files that were packed."""
        difference = self.find_difference(index)
        if difference is not None:
            as_packed = shlex.join([f"{self.key}.root=null", f"{self.key}.shards={index.folder}"])
            raise ConfigError(
                difference,
                field=f"{self.key}.root",
                fix=[
                    "add `--redo pack` to pack the images as they are now into a new folder (the old one is kept)",
                    Fix(f"continue with the images as they were packed: {as_packed}", f"{self.key}.root"),
                ],
            )

    def find_difference(self, index: SampleIndex) -> str | None:
        """Return how the source differs from what was packed; None if it does not, or if that cannot be found out."""
        if self.config.root is None or not has_files(self.config):
            return None
        root, folder = Path(self.config.root), index.folder
        if not _is_present(root):
            _log.info("%s.root = %s is not on this machine: %s is used as it was packed", self.key, root, folder)
            return None
        recorded = read_source_files(folder, index.dataset)
        if recorded is None:
            _log.info("%s has no record of its source files: it is used as it was packed", folder)
            return None
        origin = None if Path(recorded.root) == root.resolve() else recorded.root
        if len(index) > MOST_COMPARED and not self.large:
            if origin is not None:
                return (
                    f"{folder} was packed from {origin}, not from {root}, and its {len(index):,} "
                    "files are compared only with --check-source: add it if they are the same files"
                )
            _log.info("%s: the %d files are compared with %s only with --check-source", self.key, len(index), folder)
            return None
        changed = self._describe_changes(index, recorded)
        if changed is None:
            return None
        if origin is not None:
            return f"{folder} was packed from {origin}, and {root} has other files: {changed}"
        return f"{root} has changed since it was packed into {folder}: {changed}"

    def _describe_changes(self, index: SampleIndex, recorded: SourceFiles) -> str | None:
        """Return how the files differ from those that were packed; None if they do not."""
        classes = recorded.first_classes if self.config.classes is None else self.config.classes
        try:
            source = self.open_source(classes)
        except InputError as error:
            return f"it can no longer be packed ({error.problem})"
        changes = find_changes(source, index, recorded)
        return changes.describe() if changes else None


def has_files(config: DataConfig) -> bool:
    """Whether the files of this source can be compared with what was packed."""
    with suppress(ConfigError):  # the package of a data set may be missing once its shards are packed
        return find_source(config.source).has_files
    return False


def _is_present(root: Path) -> bool:
    """Whether the folder is on this machine; an empty one is taken for a mount point without its storage."""
    with suppress(OSError), os.scandir(root) as entries:
        return next(entries, None) is not None
    return False
