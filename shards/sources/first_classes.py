"""A data set restricted to its first classes, such as the 50 classes of WebVision that papers compare on."""

from pathlib import Path

import numpy as np

from shards.errors import ConfigError
from shards.sources.source import FileSource, RawSample, Source, ignored_files


def select_first_classes(source: Source, classes: int) -> Source:
    """Return a source with only the rows whose label is below `classes`, in order and renumbered from 0."""
    known = len(source.class_names)
    if not 1 <= classes <= known:
        raise ConfigError(
            f"{source.name} has {known} classes, not {classes}", field="classes", fix=f"choose from 1 to {known}"
        )
    return source if classes == known else FirstClasses(source, classes)


class FirstClasses:
    """A view of a source that contains only its first `classes` classes."""

    def __init__(self, source: Source, classes: int) -> None:
        self.name, self.split, self.subset = source.name, source.split, source.subset
        self.class_names = source.class_names[:classes]
        self.ignored = ignored_files(source)
        self._source = source
        labels = np.fromiter((source.label(row) for row in range(len(source))), np.int32, len(source))
        self._rows = np.flatnonzero(labels < classes)

    @property
    def root(self) -> Path | None:
        return self._source.root if isinstance(self._source, FileSource) else None

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, row: int) -> str:
        return self._source.key(int(self._rows[row]))

    def label(self, row: int) -> int:
        return self._source.label(int(self._rows[row]))

    def origin(self, row: int) -> str:
        return self._source.origin(int(self._rows[row]))

    def file(self, row: int) -> Path | None:
        return self._source.file(int(self._rows[row])) if isinstance(self._source, FileSource) else None

    def sample(self, row: int) -> RawSample:
        return self._source.sample(int(self._rows[row]))
