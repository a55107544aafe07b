"""The ILSVRC12 validation set, from class folders named by WordNet id, or from a flat folder or tar with a list."""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shards.errors import DataError
from shards.image_formats import SUFFIXES
from shards.sources.file_list import stem
from shards.sources.inside import FolderImages, is_there, refuse_undecodable_name
from shards.sources.source import (
    Images,
    RawSample,
    SourceType,
    is_image,
    list_names,
    require_root,
    require_split,
    suffix_of,
)
from shards.sources.synsets import imagenet_synsets, is_wnid, read_synsets, wnid
from shards.sources.tar_members import TarImages, locate_members
from shards.sources.text_file import TextFile, find_text, read_lines, refuse_line

_SPLITS = ("val",)
_TAR = "ILSVRC2012_img_val.tar"
_BASES = ("", "val", "ILSVRC2012_img_val")
_LISTS = ("ILSVRC2012_val_label.txt", "LOC_val_solution.csv")
_SYNSETS = ("synsets.txt", "info/synsets.txt")
_LAYOUT = (
    "class folders named by WordNet id (n01440764/*.JPEG, directly or in val/), or all images in one folder (the "
    f"root, val/ or ILSVRC2012_img_val/) or in {_TAR}, with {_LISTS[0]} (lines `NAME NUMBER WNID` or `NAME WNID`) "
    f"or {_LISTS[1]}"
)


@dataclass(frozen=True)
class _Row:
    name: str  # file name: rows are sorted by it, and it is the key without its suffix
    path: str  # relative to the root, or inside the tar
    label: int
    origin: str


class Ilsvrc12:
    """The split `val`, sorted by file name, so that all three layouts give the same rows.

    Labels are found by WordNet id, because the devkit numbers classes differently and class names are not unique. The
    classes are those of WebVision, even if some have no images here.
    """

    name = "ilsvrc12"
    subset = ""

    def __init__(self, root: Path | None, split: str) -> None:
        require_split(self.name, split, _SPLITS)
        self.split = split
        folder = require_root(self.name, root, _LAYOUT, reads_tars=True)
        synsets = next((path for path in _SYNSETS if is_there(folder / path)), None)
        self.class_names = read_synsets(find_text(folder, synsets)) if synsets else imagenet_synsets()
        labels = {wnid(name): label for label, name in enumerate(self.class_names)}
        self._rows, self._images = _open_rows(folder, labels)

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, row: int) -> str:
        return f"val/{stem(self._rows[row].name)}"

    def label(self, row: int) -> int:
        return self._rows[row].label

    def origin(self, row: int) -> str:
        return self._rows[row].origin

    def sample(self, row: int) -> RawSample:
        found = self._rows[row]
        data = self._images.read(row, found.path, found.origin)
        return RawSample(self.key(row), found.label, SUFFIXES[suffix_of(found.name)], data)


SOURCE = SourceType(Ilsvrc12.name, Ilsvrc12, splits=_SPLITS, published={("val", "all"): (50_000, 1000)})


def _open_rows(root: Path, labels: dict[str, int]) -> tuple[list[_Row], Images]:
    for base in _BASES:
        folders, files = list_names(root / base) if is_there(root / base) else ([], [])
        if any(is_wnid(name) for name in folders):
            return _rows_of_folders(root, base, sorted(filter(is_wnid, folders)), labels), FolderImages(root)
        images = {name for name in files if is_image(name)}
        if images:
            text = _find_list(root, f"{root / base} holds images but not their classes")
            before = f"{base}/" if base else ""
            rows = [_Row(row.name, before + row.name, row.label, row.origin) for row in _read_list(text, labels)]
            return _keep_present(rows, images, root / base), FolderImages(root)
    if is_there(root / _TAR):
        return _rows_of_tar(
            root / _TAR, _read_list(_find_list(root, f"{_TAR} holds images but not their classes"), labels)
        )
    raise DataError(f"the ILSVRC12 validation set was not found in {root}. Expected there: {_LAYOUT}")


def _rows_of_folders(root: Path, base: str, wnids: list[str], labels: dict[str, int]) -> list[_Row]:
    rows: list[_Row] = []
    for name in wnids:
        folder = f"{base}/{name}" if base else name
        if name not in labels:
            raise DataError(f"the folder {root / folder} is not one of the {len(labels):,} classes; remove it")
        images = [file for file in list_names(root / folder)[1] if is_image(file)]
        if not images:
            raise DataError(f"the class folder {root / folder} contains no image (.JPEG, .jpg, .png, ...)")
        for file in images:
            refuse_undecodable_name(f"{folder}/{file}", root)
        rows += [_Row(file, f"{folder}/{file}", labels[name], f"{folder}/{file}") for file in images]
    return _sort_rows(rows)


def _find_list(root: Path, problem: str) -> TextFile:
    for folder in ("", "info/"):
        for name in _LISTS:
            if is_there(root / folder / name):
                return find_text(root, folder + name)
    raise DataError(
        f"{problem}: neither {_LISTS[0]} nor {_LISTS[1]} is in {root}. Add one of them (not the devkit's "
        "ILSVRC2012_validation_ground_truth.txt, which numbers the classes differently), or sort the images into "
        "folders named by WordNet id"
    )


def _read_list(text: TextFile, labels: dict[str, int]) -> list[_Row]:
    """Read the rows of a list; returns them sorted by file name."""
    is_table = text.path.endswith(".csv")
    rows = []
    for number, line in enumerate(read_lines(text).to_pylist(), start=1):
        if is_table and number == 1 and line.startswith("ImageId,"):
            continue
        name, found = _parse_table_line(line) if is_table else _parse_plain_line(line)
        if not is_wnid(found):
            form = "ImageId,WNID ..." if is_table else "NAME NUMBER WNID or NAME WNID; a number alone is not enough"
            raise refuse_line(text, number, line, f"expected an image and a WordNet id ({form})")
        if "/" in name or not is_image(name):
            raise refuse_line(text, number, line, "the image must be a bare file name ending in .JPEG, .jpg or .png")
        if found not in labels:
            raise refuse_line(text, number, line, f"{found} is not one of the {len(labels):,} classes")
        rows.append(_Row(name, name, labels[found], f"{text.name} line {number}"))
    if not rows:
        raise DataError(f"{text.name} in {text.root} is empty; download the whole list")
    return _sort_rows(rows)


def _parse_plain_line(line: str) -> tuple[str, str]:
    """Parse `NAME WNID` or `NAME NUMBER WNID`; returns (name, wnid), both empty if the line has another form."""
    words = line.split()
    is_known = len(words) == 2 or (len(words) == 3 and words[1].isdecimal())
    return (words[0], words[-1]) if is_known else ("", "")


def _parse_table_line(line: str) -> tuple[str, str]:
    """Parse a line of LOC_val_solution.csv; returns (name with suffix, wnid of the first bounding box)."""
    name, _, boxes = line.partition(",")
    words = boxes.split()
    return f"{name}.JPEG", words[0] if words else ""


def _sort_rows(rows: list[_Row]) -> list[_Row]:
    """Sort by file name; raises DataError if two files have the same name, because they would share a key."""
    rows = sorted(rows, key=lambda row: (row.name, row.path))
    first: dict[str, _Row] = {}
    for row in rows:
        other = first.setdefault(stem(row.name), row)
        if other is not row:
            raise DataError(f"the image {row.name} appears twice: {other.origin} and {row.origin}; remove one")
    return rows


def _keep_present(rows: list[_Row], names: Iterable[str], place: Path) -> list[_Row]:
    """Drop classes without any image, so that a subset works; a class with only some images missing is an error."""
    present = set(names)
    found = Counter(row.label for row in rows if row.name in present)
    kept = [row for row in rows if found[row.label]]
    missing = [row for row in kept if row.name not in present]
    if missing:
        raise DataError(
            f"{place} lacks {len(missing):,} of its {len(kept):,} images; the first is {missing[0].name} "
            f"({missing[0].origin}). Add them"
        )
    if not kept:
        raise DataError(f"{place} contains none of the {len(rows):,} listed images (from {rows[0].origin} on)")
    unlisted = len(present) - len(kept)
    if unlisted:
        logging.getLogger(__name__).warning("%s: %d images are not in the list and were ignored", place, unlisted)
    return kept


def _rows_of_tar(tar: Path, rows: list[_Row]) -> tuple[list[_Row], Images]:
    places = locate_members(tar, {row.name: number for number, row in enumerate(rows)})
    numbers = {row.name: number for number, row in enumerate(rows) if places.offsets[number] >= 0}
    kept = _keep_present(rows, numbers, tar)
    chosen = [numbers[row.name] for row in kept]
    return kept, TarImages(tar, places.state, places.offsets[chosen], places.nbytes[chosen])
