"""WebVision 1.0, web images labelled by the query that found them, from folders or the official tars."""

import os
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from shards.errors import ConfigError, DataError, did_you_mean
from shards.image_formats import SUFFIXES
from shards.sources.file_list import FileList, stem
from shards.sources.inside import FolderImages, is_there
from shards.sources.source import (
    Images,
    RawSample,
    SourceType,
    require_root,
    require_split,
    suffix_of,
)
from shards.sources.synsets import read_synsets
from shards.sources.tar_members import TarImages, locate_members
from shards.sources.text_file import TextFile, find_text, find_texts_in_tar

_SPLITS = ("train", "val")
_SUBSETS = {"google": ("google",), "flickr": ("flickr",), "all": ("google", "flickr")}
_LAYOUT = (
    "info/ (synsets.txt, train_filelist_google.txt, train_filelist_flickr.txt, val_filelist.txt) or info.tar; "
    "google/ or google_resized_256.tar; flickr/ or flickr_resized_256.tar; val_images_256/ or val_images_256.tar"
)


@dataclass(frozen=True)
class _PartNames:
    """The published file names of one part (google, flickr or val)."""

    file_list: str
    folder: str  # of the images, relative to the root
    tar: str
    prefix: str  # common to all paths in the list
    key_prefix: str  # put before a path of the list to form its key


_PARTS = {
    "google": _PartNames("info/train_filelist_google.txt", "google", "google_resized_256.tar", "google/", ""),
    "flickr": _PartNames("info/train_filelist_flickr.txt", "flickr", "flickr_resized_256.tar", "flickr/", ""),
    "val": _PartNames("info/val_filelist.txt", "val_images_256", "val_images_256.tar", "", "val/"),
}


@dataclass(frozen=True)
class _Part:
    names: _PartNames
    files: FileList
    images: Images


class WebVision:
    """The splits `train` (subsets google, flickr and all, which is google then flickr) and `val`, in list order.

    A key is the listed path without its suffix, such as `google/q0001/name`; file names alone are not unique across
    queries. Two paths that differ only in the suffix are refused as duplicates.
    """

    name = "webvision"

    def __init__(self, root: Path | None, split: str, subset: str | None = None) -> None:
        require_split(self.name, split, _SPLITS)
        self.split, self.subset = split, _require_subset(split, subset)
        folder = require_root(self.name, root, _LAYOUT, reads_tars=True)
        parts = [_PARTS[name] for name in (_SUBSETS[self.subset] if self.subset else ("val",))]
        texts = _find_lists(folder, ["info/synsets.txt", *(part.file_list for part in parts)])
        self.class_names = read_synsets(texts["info/synsets.txt"])
        self._parts = [_open_part(folder, part, texts[part.file_list], len(self.class_names)) for part in parts]
        self._ends = list(accumulate(len(part.files) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def key(self, row: int) -> str:
        part, line = self._place(row)
        return part.names.key_prefix + stem(part.files.path(line))

    def label(self, row: int) -> int:
        part, line = self._place(row)
        return int(part.files.labels[line])

    def origin(self, row: int) -> str:
        part, line = self._place(row)
        return part.files.origin(line)

    def sample(self, row: int) -> RawSample:
        part, line = self._place(row)
        path = part.files.path(line)
        suffix = SUFFIXES[suffix_of(path)]
        data = part.images.read(line, path, part.files.origin(line))
        return RawSample(self.key(row), self.label(row), suffix, data)

    def _place(self, row: int) -> tuple[_Part, int]:
        """Return the part that contains a row, and the row number within that part."""
        if not 0 <= row < self._ends[-1]:
            raise IndexError(f"row {row} of {self._ends[-1]}")
        number = bisect_right(self._ends, row)
        return self._parts[number], row - (self._ends[number - 1] if number else 0)


SOURCE = SourceType(
    WebVision.name,
    WebVision,
    splits=_SPLITS,
    subsets=tuple(_SUBSETS),
    note="--subset is for train only, default: all",
    published={
        ("train", "google"): (980_000, 1000),
        ("train", "flickr"): (1_460_000, 1000),
        ("train", "all"): (2_440_000, 1000),
        ("val", "all"): (50_000, 1000),
    },
    published_parts={("train", "google", 50): 66_000},  # not proportional: classes differ in size
)


def _require_subset(split: str, subset: str | None) -> str:
    if split == "val":
        if subset is not None:
            raise ConfigError("the val split of webvision has no subsets", field="subset", fix="leave it out")
        return ""
    if subset is not None and subset not in _SUBSETS:
        raise ConfigError(f"webvision has no subset {subset!r}; {did_you_mean(subset, _SUBSETS)}")
    return subset or "all"


def _find_lists(root: Path, paths: list[str]) -> dict[str, TextFile]:
    """Locate the lists by path, as extracted files or else in info.tar."""
    texts = {path: find_text(root, path) for path in paths if is_there(root / path)}
    missing = [path for path in paths if path not in texts]
    if missing and is_there(root / "info.tar"):
        texts |= find_texts_in_tar(root, "info.tar", missing, "info")
        missing = [path for path in paths if path not in texts]
    if missing:
        raise DataError(
            f"{root} has no {missing[0]}, neither as a file nor in info.tar. Expected there: {_LAYOUT}. "
            "Download info.tar from WebVision's website to this folder"
        )
    return texts


def _open_part(root: Path, names: _PartNames, text: TextFile, classes: int) -> _Part:
    files = FileList(text)
    files.check(names.prefix, classes)
    return _Part(names, files, _open_images(root, names, files))


def _open_images(root: Path, names: _PartNames, files: FileList) -> Images:
    folder = "" if names.prefix else names.folder
    if os.path.isdir(root / names.folder):
        return FolderImages(root, folder)
    tar = root / names.tar
    if not is_there(tar):
        compressed = sorted(path.name for path in root.glob(f"{tar.stem}.t*") if path.is_file())
        hint = f"; {compressed[0]} must be decompressed to {names.tar} first" if compressed else ""
        raise DataError(f"{root} has neither {names.folder}/ nor {names.tar}{hint}. Expected there: {_LAYOUT}")
    before = f"{folder}/" if folder else ""
    places = locate_members(tar, {before + files.path(row): row for row in range(len(files))}, names.folder)
    missing = places.missing()
    if len(missing):
        first = int(missing[0])
        raise DataError(
            f"{tar} lacks {len(missing):,} of the {len(files):,} listed images; the first is "
            f"{files.path(first)} ({files.origin(first)}). Download it again, or extract it and add the images"
        )
    return TarImages(tar, places.state, places.offsets, places.nbytes)
