"""Read a label file (`labels.file`): a CSV of key,label, or one label per line in the source's order."""

import csv
import hashlib
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shards.errors import DataError
from shards.sample_index import SampleIndex

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")  # stricter than int(), which accepts 0_1 and non-ASCII digits
Lines = list[tuple[int, str]]


def read_label_file(path: Path, index: SampleIndex) -> npt.NDArray[np.int64]:
    """Read labels by sample_id; raises DataError unless every sample has exactly one valid label."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"labels.file {path} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    by_key = bool(lines) and "," in lines[0][1]
    labels = _by_key(path, lines, index) if by_key else _in_order(path, lines, index)
    outside = np.flatnonzero((labels < 0) | (labels >= index.num_classes))
    if len(outside):
        raise DataError(
            f"labels.file {path}: label {labels[outside[0]]} of {index.keys(outside[:1])[0]!r} is outside "
            f"0..{index.num_classes - 1}"
        )
    return labels


def file_checksum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"labels.file {path} cannot be read: {error}") from error


def _in_order(path: Path, lines: Lines, index: SampleIndex) -> npt.NDArray[np.int64]:
    if len(lines) != len(index):
        raise DataError(
            f"labels.file {path} has {len(lines)} labels, but the data set has {len(index)} samples: write one "
            "label per line in the source's order, or a CSV with the columns key,label"
        )
    return np.asarray([_as_label(path, number, line, index) for number, line in lines], np.int64)


def _by_key(path: Path, lines: Lines, index: SampleIndex) -> npt.NDArray[np.int64]:
    id_of = {key: sample_id for sample_id, key in enumerate(index.keys())}
    labels = np.full(len(index), -1, np.int64)
    seen = np.zeros(len(index), bool)
    for position, (number, line) in enumerate(lines):
        cells = _cells(path, number, line)
        if position == 0 and [cell.lower() for cell in cells] == ["key", "label"]:
            continue
        if len(cells) != 2:
            raise DataError(f"labels.file {path}, line {number}: expected key,label, found {line[:80]!r}")
        key, label = cells
        sample_id = id_of.get(key)
        if sample_id is None:
            known = ", ".join(repr(each) for each in index.keys(np.arange(min(2, len(index)))))
            raise DataError(
                f"labels.file {path}, line {number}: the data set has no key {key[:80]!r}; keys look like {known} "
                "(a header, if there is one, must be key,label)"
            )
        if seen[sample_id]:
            raise DataError(f"labels.file {path}, line {number}: key {key!r} occurs twice")
        seen[sample_id] = True
        labels[sample_id] = _as_label(path, number, label, index)
    missing = np.flatnonzero(~seen)
    if len(missing):
        some = ", ".join(repr(key) for key in index.keys(missing[:3]))
        raise DataError(f"labels.file {path} lacks {len(missing)} of {len(index)} keys, for example {some}")
    return labels


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:
        raise DataError(f"labels.file {path}, line {number}: not valid CSV ({error})") from None


def _as_label(path: Path, number: int, text: str, index: SampleIndex) -> int:
    """Parse a label: a class number or a class name."""
    text = text.strip()
    if _WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if text in index.class_names:
        return index.class_names.index(text)
    some = ", ".join(f"{label} = {name}" for label, name in enumerate(index.class_names[:5]))
    raise DataError(
        f"labels.file {path}, line {number}: {text[:40]!r} is neither a class number nor a class name; "
        f"classes are {some}{', ...' if index.num_classes > 5 else ''}"
    )
