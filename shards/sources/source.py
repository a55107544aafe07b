"""The interface of a data set, its registry record, checks shared by all data sets, and a view of first classes."""

import io
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from shards.errors import ConfigError, DataError, did_you_mean
from shards.image_formats import SUFFIXES

_log = logging.getLogger(__name__)
_NUMBER = re.compile(r"-?[0-9]{1,9}")  # stricter than int(), which accepts 0_1 and non-ASCII digits


def suffix_of(name: str) -> str:
    """Return the lower-case suffix, from the last dot on, even of a name like `..jpg`, which occurs in web data."""
    base = name.rpartition("/")[2]
    return base[base.rfind(".") :].lower() if "." in base else ""


def is_image(name: str) -> bool:
    """Whether a file name has an image suffix; hidden files do not count."""
    return not name.startswith(".") and suffix_of(name) in SUFFIXES


@dataclass(frozen=True)
class RawSample:
    """One image as the source provides it; `data` is a complete image file, not yet checked."""

    key: str
    label: int
    suffix: str  # the format by the name of the file: a value of SUFFIXES
    data: bytes


class Source(Protocol):
    """A list of labelled images with random access; picklable, so that worker processes can read it."""

    @property
    def name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def subset(self) -> str:
        """The selected subset of the split; "" if the source has no subsets."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def key(self, row: int) -> str:
        """Return the unique name of a row, without reading its image."""

    def label(self, row: int) -> int:
        """Return the class of a row, without reading its image."""

    def origin(self, row: int) -> str:
        """Describe where the row comes from, for error messages: a line of a list, or a file."""

    def sample(self, row: int) -> RawSample: ...


@runtime_checkable
class FileSource(Source, Protocol):
    """A source whose rows are files, so that a run can find out whether they have changed since they were packed."""

    @property
    def root(self) -> Path | None:
        """The folder of the files, absolute."""

    def file(self, row: int) -> Path | None:
        """Return the file of a row; None if the row has no file of its own."""


@dataclass(frozen=True)
class SourceOptions:
    """How to read images with a list of labels; each data set takes some of these options."""

    csv: str | None = None
    """A CSV file of paths and labels."""
    path_column: str | None = None
    """The column of the paths; None: recognised by its name."""
    label_column: str | None = None
    """The column of the labels (webdataset: the key in .json members); None: recognised by its name."""
    partial: bool = False
    """Ignore images without a label instead of refusing them."""
    allow_outside: bool = False
    """Accept paths and links that leave the root."""

    def given(self) -> dict[str, str | bool]:
        """Return the options that differ from their defaults."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False)}


class IgnoredFile(NamedTuple):
    """A file of a source that is not one of its rows. path: relative to the root, or inside a tar."""

    path: str
    reason: str


def ignored_files(source: Source) -> Sequence[IgnoredFile]:
    """Return the files that a source left out, if it lists them in its attribute `ignored`."""
    return getattr(source, "ignored", ())


def warn_of_ignored(place: Path, ignored: Sequence[IgnoredFile], what: str = "files") -> None:
    """Log how many files of `place` a source leaves out, and an example, if there are any."""
    if ignored:
        one = len(ignored) == 1
        counted = f"1 {what.removesuffix('s')} was" if one else f"{len(ignored):,} {what} were"
        example, reason = ignored[0]
        _warn_once(f"{place}: {counted} ignored{':' if one else ', for example'} {example} ({reason})")


@cache
def _warn_once(message: str) -> None:
    """Log a warning, once in a process: a command may open a source several times, to inspect, pack and check it."""
    _log.warning("%s", message)


@dataclass(frozen=True)
class SourceType:
    """The registry record of a data set: `SOURCE` in its module, or the object of an `incv.sources` entry point."""

    name: str
    open: Callable[..., Source]
    """Called with (root, split), and with the subset (None: the default) if the data set has subsets."""
    splits: tuple[str, ...]
    """Empty if the splits are the folders in the root."""
    subsets: tuple[str, ...] = ()
    needs_root: bool = True
    keys_are_paths: bool = False
    """Whether a key is the path of its image: relative to the root, or absolute if it is outside."""
    has_files: bool = False
    """Whether it is a `FileSource`; if so, every start compares its files with those that were packed."""
    options: tuple[str, ...] = ()
    """The options of SourceOptions that `open` takes, as keyword arguments."""
    note: str = ""
    """A remark for the command-line help."""
    published: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Published (samples, classes) by (split, subset); the subset is "all" if the data set has none."""
    published_parts: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """Samples by (split, subset, number of first classes), if known not to be proportional to the classes."""


class Images(Protocol):
    """Reads the images of a list: from a folder by path, or from a tar by row; `origin` is for errors."""

    def read(self, row: int, path: str, origin: str) -> bytes: ...


def require_split(source: str, split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise ConfigError(f"{source} has no split {split!r}; {did_you_mean(split, known)}")


def require_root(source: str, root: Path | None, layout: str, reads_tars: bool = False) -> Path:
    """Return `root` as an absolute path; raises DataError with the expected layout if it is not a folder."""
    if root is None:
        raise DataError(f"{source} needs the folder with its images. Expected there: {layout}", field="root")
    try:
        root.stat()
    except PermissionError as error:
        raise DataError(f"{root} cannot be read: {error.strerror}") from error
    except OSError:
        pass  # reported below
    if root.is_file():
        advice = "Pass the folder it is in" if reads_tars else f"Unpack it (tar -xf {root}) and pass the folder"
        raise DataError(f"{root} is a file, not a folder. {advice}. Expected there: {layout}", field="root")
    if not root.is_dir():
        raise DataError(
            f"{root} does not exist. Expected there: {layout}",
            field="root",
            fix=f"name the folder with {source}'s images",
        )
    return root.resolve()


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder by name; raises DataError if it cannot be read."""
    with _folder_errors(folder):
        return sorted(folder.iterdir(), key=lambda entry: entry.name)


def list_names(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders and those of the files in a folder; raises DataError if it cannot be read.

    It needs no status of each file, which takes minutes on network storage with a million files.
    """
    with _folder_errors(folder), os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    return [name for name, is_folder in found if is_folder], [name for name, is_folder in found if not is_folder]


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {error.strerror}. Give yourself the permission to read it, or copy it"
        ) from error


def sort_class_names(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels in the order of the classes: numbers by value, other texts by their characters."""
    distinct = set(labels)
    numbers = {int(label) for label in distinct if _NUMBER.fullmatch(label)}
    return tuple(sorted(distinct, key=int) if len(numbers) == len(distinct) else sorted(distinct))


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode uint8 pixels, [H, W] gray or [H, W, 3] RGB, as a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


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
