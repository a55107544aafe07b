"""Existing WebDataset tars: <key>.jpg (or .png, .webp, ...) with its label in <key>.cls or <key>.json."""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from shards.errors import ConfigError, DataError, Fix
from shards.image_formats import SUFFIXES
from shards.sources.inside import is_there
from shards.sources.source import (
    IgnoredFile,
    RawSample,
    SourceType,
    list_folder,
    require_root,
    sort_class_names,
    warn_of_ignored,
)
from shards.sources.tar_members import FileState, Member, TarImages, list_members, open_tar
from shards.sources.text_file import find_text, read_lines

_LAYOUT = "<split>/*.tar or <split>*.tar (for the split '': *.tar), and optionally classes.txt with one name per line"
_CLASSES = "classes.txt"
_JSON_KEYS = ("label", "cls", "class", "category", "target", "class_name", "label_name")
_LARGEST_LABEL = 2**20  # bytes of a .cls or .json member
_OPEN_TARS = 64  # per process


@dataclass
class _Sample:
    """One sample of a tar: its image, and the members that may have its label."""

    images: list[Member] = field(default_factory=list)
    cls: Member | None = None
    json: Member | None = None


class WebDataset:
    """The samples of all tars, in the order of the tars and of their members; a key is <tar without .tar>/<key>.

    Labels are numbers or names. With classes.txt, numbers count its lines from 0, and names are its lines; without
    it, the classes are the labels that occur.
    """

    name = "webdataset"
    subset = ""

    def __init__(self, root: Path | None, split: str, label_column: str | None = None, partial: bool = False) -> None:
        """label_column: the key of the label in .json members; partial: ignore samples without a label."""
        self.split = split
        self._root = require_root(self.name, root, _LAYOUT, reads_tars=True)
        self._json_keys = (label_column,) if label_column else _JSON_KEYS
        self.ignored: list[IgnoredFile] = []
        self._keys: list[str] = []
        self._suffixes: list[str] = []
        texts: list[str] = []
        tars = _list_tars(self._root, split)
        self._tars: list[TarImages] = []
        first_rows = []
        for tar in tars:
            first_rows.append(len(self._keys))
            texts += self._read_tar(tar, partial)
        if not self._keys:
            raise DataError(
                f"the {len(tars):,} tars of {self._root} contain no image with a label. Expected in a tar: images "
                "with their labels, as cat17.jpg with cat17.cls or cat17.json"
            )
        self._first_rows = np.array(first_rows, np.int64)
        self.class_names, self._labels = self._number_labels(texts, tars[0].parent)
        self._open: OrderedDict[int, None] = OrderedDict()
        warn_of_ignored(self._root, self.ignored, "members")

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, row: int) -> str:
        return self._keys[row]

    def label(self, row: int) -> int:
        return int(self._labels[row])

    def origin(self, row: int) -> str:
        return f"{self._keys[row]}.{self._suffixes[row]}"

    def sample(self, row: int) -> RawSample:
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        self._keep_few_open(number)
        data = self._tars[number].read(row - int(self._first_rows[number]), self._keys[row], self.origin(row))
        return RawSample(self._keys[row], self.label(row), SUFFIXES[f".{self._suffixes[row].lower()}"], data)

    def _keep_few_open(self, number: int) -> None:
        """Close the tar that was not read for the longest time, if too many are open."""
        self._open[number] = None
        self._open.move_to_end(number)
        if len(self._open) > _OPEN_TARS:
            self._tars[self._open.popitem(last=False)[0]].close()

    def _read_tar(self, tar: Path, partial: bool) -> list[str]:
        """Add the samples of a tar; returns the text of each label."""
        name = tar.relative_to(self._root).as_posix()
        texts: list[str] = []
        images: list[Member] = []
        with open_tar(tar) as file:
            state = FileState.of(file)
            for key, sample in self._group_members(tar, name).items():
                if not sample.images:
                    self.ignored.append(IgnoredFile(f"{name}: {key}", "a label without an image"))
                    continue
                image = sample.images[0]
                text = self._read_label(file, tar, sample)
                if not text and not partial:
                    names = " or ".join(self._json_keys)
                    raise DataError(
                        f"{tar}: {image.name} has no label: neither {key}.cls nor a key {names} in {key}.json",
                        fix=[
                            Fix("name the key with {}", "label_column"),
                            Fix("ignore such images with {}", "partial"),
                        ],
                    )
                if not text:
                    self.ignored.append(IgnoredFile(f"{name}: {image.name}", "no label"))
                    continue
                images.append(image)
                texts.append(text)
                self._keys.append(f"{name.removesuffix('.tar')}/{key}")
                self._suffixes.append(image.name[len(key) + 1 :])
        offsets = np.array([image.offset for image in images], np.int64)
        self._tars.append(TarImages(tar, state, offsets, np.array([image.nbytes for image in images], np.int64)))
        return texts

    def _group_members(self, tar: Path, name: str) -> dict[str, _Sample]:
        """Return the samples of a tar by key: the path up to the first dot of the file name, as in WebDataset."""
        samples: dict[str, _Sample] = {}
        for member in list_members(tar):
            key, suffix = split_member_name(member.name)
            if f".{suffix}" in SUFFIXES:
                sample = samples.setdefault(key, _Sample())
                sample.images.append(member)
                if len(sample.images) > 1:
                    both = " and ".join(image.name for image in sample.images)
                    raise DataError(f"{tar}: the sample {key!r} has two images, {both}; keep one per sample")
            elif suffix in ("cls", "json"):
                sample = samples.setdefault(key, _Sample())
                if getattr(sample, suffix) is not None:
                    raise DataError(f"{tar} contains {member.name} twice; write the tar again")
                setattr(sample, suffix, member)
            else:
                self.ignored.append(IgnoredFile(f"{name}: {member.name}", "neither an image nor a label"))
        return samples

    def _read_label(self, file: IO[bytes], tar: Path, sample: _Sample) -> str:
        """Return the label as text: of the .cls member, or of the .json member; "" if there is none."""
        if sample.cls is not None:
            return _read_text(file, tar, sample.cls).strip()
        if sample.json is None:
            return ""
        try:
            content = json.loads(_read_text(file, tar, sample.json))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{tar}: {sample.json.name} is not JSON: {error}") from None
        found: Any = None
        if isinstance(content, dict):
            found = next((content[name] for name in self._json_keys if content.get(name) is not None), None)
        if found is None:
            return ""
        if isinstance(found, bool) or not isinstance(found, int | str):
            raise DataError(f"{tar}: the label in {sample.json.name} is {found!r:.60}, not a number or a name")
        return str(found).strip()

    def _number_labels(self, texts: Sequence[str], folder: Path) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the class names, and the label of each row."""
        names = _read_classes(self._root, folder)
        classes = sort_class_names(texts) if names is None else names
        number_of = {name: number for number, name in enumerate(classes)}
        if names is not None and not set(number_of) & set(texts):  # labels are numbers, unless some are names
            number_of = {str(number): number for number in range(len(names))}
        labels = np.array([number_of.get(text, -1) for text in texts], np.int32)
        unknown = np.flatnonzero(labels < 0)
        if len(unknown):
            row = int(unknown[0])
            raise DataError(
                f"{self._keys[row]} has the label {texts[row][:60]!r}, which is neither a line of {_CLASSES} nor the "
                f"number of one (0 to {len(classes) - 1})"
            )
        if len(set(texts)) == 1:
            raise DataError(
                f"all {len(texts):,} samples have the label {texts[0][:60]!r}; at least two classes are needed"
            )
        return classes, labels


SOURCE = SourceType(
    WebDataset.name,
    WebDataset,
    splits=(),
    options=("label_column", "partial"),
    note="or the start of the names of tars; '' for all tars in --root",
)


def split_member_name(name: str) -> tuple[str, str]:
    """Split the name of a member at the first dot of its file name; returns the key and the suffix in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


def _read_text(file: IO[bytes], tar: Path, member: Member) -> str:
    if member.nbytes > _LARGEST_LABEL:
        raise DataError(f"{tar}: {member.name} has {member.nbytes:,} bytes, too many for a label")
    try:
        return os.pread(file.fileno(), member.nbytes, member.offset).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{tar}: {member.name} is not UTF-8 text") from None
    except OSError as error:
        raise DataError(f"{tar} cannot be read: {error.strerror}") from error


def _list_tars(root: Path, split: str) -> list[Path]:
    """Return the tars of a split, sorted: those in ROOT/<split>, or those in ROOT whose name starts with <split>."""
    folder = root / split
    if folder.is_dir() and folder.resolve().is_relative_to(root):
        tars = list(_tars_in(folder))
        place = folder
    else:
        tars = [tar for tar in _tars_in(root) if tar.name.startswith(split)]
        place = root / f"{split}*.tar"
    if not tars:
        found = [tar.name for tar in _tars_in(root)]
        hint = f"; {root} contains {', '.join(found[:5])}: use the empty split '' for all of them" if found else ""
        raise ConfigError(f"{place} contains no .tar file{hint}. Expected under {root}: {_LAYOUT}")
    return tars


def _tars_in(folder: Path) -> Iterator[Path]:
    yield from (path for path in list_folder(folder) if path.suffix == ".tar" and path.is_file())


def _read_classes(root: Path, folder: Path) -> tuple[str, ...] | None:
    """Return the lines of classes.txt beside the tars or in the root; None if there is none."""
    for place in dict.fromkeys((folder, root)):
        if is_there(place / _CLASSES):
            names = tuple(line.strip() for line in read_lines(find_text(place, _CLASSES)).to_pylist())
            if len(set(names)) < len(names) or "" in names:
                raise DataError(f"{place / _CLASSES} has an empty line or the same class twice; correct it")
            return names
    return None
