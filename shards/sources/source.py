"""The interface of a data set, its registry record, and the checks that all data sets share."""

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
    """From the last dot on, in lower case; also of `..jpg`, a name that occurs in web data."""
    base = name.rpartition("/")[2]
    return base[base.rfind(".") :].lower() if "." in base else ""


def is_image(name: str) -> bool:
    """Whether a file is an image by its name; hidden files are not."""
    return not name.startswith(".") and suffix_of(name) in SUFFIXES


@dataclass(frozen=True)
class RawSample:
    """One image as the source holds it; `data` is a whole PNG or JPEG file, not yet checked."""

    key: str
    label: int
    suffix: str  # "png" or "jpg"
    data: bytes


class Source(Protocol):
    """A list of labelled images with random access; picklable, so that processes can share the work."""

    @property
    def name(self) -> str: ...

    @property
    def split(self) -> str: ...

    @property
    def subset(self) -> str:
        """The requested part of the split, "" for a source without subsets."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def key(self, row: int) -> str:
        """The unique name of a row, without reading its pixels."""

    def label(self, row: int) -> int:
        """The class of a row, without reading its pixels."""

    def origin(self, row: int) -> str:
        """Where the row comes from, for errors: a line of a list, or a file."""

    def sample(self, row: int) -> RawSample: ...


@dataclass(frozen=True)
class SourceType:
    """The record of one data set: `SOURCE` in its file, or what an entry point of `incv.sources` loads to."""

    name: str
    open: Callable[..., Source]
    """From (root, split), and the subset (None: not given) where there are subsets."""
    splits: tuple[str, ...]
    """Empty where the splits are the folders under the root."""
    subsets: tuple[str, ...] = ()
    needs_root: bool = True
    note: str = ""
    """A remark for the help of the command line."""
    published: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(samples, classes) by (split, subset); the subset is "all" where there are none."""
    published_parts: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """Samples by (split, subset, first classes), where these are known not to be proportional."""


class Images(Protocol):
    """The image files of a list: a folder finds them by path, a tar by row; `origin` is for errors."""

    def read(self, row: int, path: str, origin: str) -> bytes: ...


def require_split(source: str, split: str, known: tuple[str, ...]) -> None:
    if split not in known:
        raise ConfigError(f"{source} has no split {split!r}; {did_you_mean(split, known)}")


def require_root(source: str, root: Path | None, layout: str, reads_tars: bool = False) -> Path:
    """`root` as an absolute folder; otherwise an error that describes the expected layout."""
    if root is None:
        raise DataError(f"{source} needs --root, the folder of its images. Expected there: {layout}")
    try:
        root.stat()
    except PermissionError as error:
        raise DataError(f"{root} cannot be read: {error.strerror}") from error
    except OSError:
        pass  # reported below
    if root.is_file():
        advice = "Give the folder it lies in" if reads_tars else f"Unpack it (tar -xf {root}) and give the folder"
        raise DataError(f"{root} is a file, not a folder. {advice}. Expected there: {layout}")
    if not root.is_dir():
        raise DataError(
            f"{root} does not exist. Expected there: {layout}. Give the folder of {source}'s images as --root"
        )
    return root.resolve()


def encode_png(pixels: np.ndarray) -> bytes:
    """A lossless PNG file of uint8 pixels, [H, W] gray or [H, W, 3] RGB."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()
