"""The interface of a data set, its registry record, and checks shared by all data sets."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from shards.errors import ConfigError, DataError, did_you_mean

SUFFIXES = {".jpg": "jpg", ".jpeg": "jpg", ".png": "png"}


def suffix_of(name: str) -> str:
    """Return the lower-case suffix, from the last dot on, even of a name like `..jpg`, which occurs in web data."""
    base = name.rpartition("/")[2]
    return base[base.rfind(".") :].lower() if "." in base else ""


def is_image(name: str) -> bool:
    """Whether a file name has an image suffix; hidden files do not count."""
    return not name.startswith(".") and suffix_of(name) in SUFFIXES


@dataclass(frozen=True)
class RawSample:
    """One image as the source provides it; `data` is a complete PNG or JPEG file, not yet checked."""

    key: str
    label: int
    suffix: str  # "png" or "jpg"
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
    """Whether a key is the path of its image relative to the root."""
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
        raise DataError(f"{source} needs --root, the folder with its images. Expected there: {layout}")
    try:
        root.stat()
    except PermissionError as error:
        raise DataError(f"{root} cannot be read: {error.strerror}") from error
    except OSError:
        pass  # reported below
    if root.is_file():
        advice = "Pass the folder it is in" if reads_tars else f"Unpack it (tar -xf {root}) and pass the folder"
        raise DataError(f"{root} is a file, not a folder. {advice}. Expected there: {layout}")
    if not root.is_dir():
        raise DataError(
            f"{root} does not exist. Expected there: {layout}. Pass the folder with {source}'s images as --root"
        )
    return root.resolve()


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode uint8 pixels, [H, W] gray or [H, W, 3] RGB, as a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()
