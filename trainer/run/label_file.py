"""Read labels from files: `labels.file` has a label for every sample, `labels.corrections` for some of them."""

import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shards.csv_file import DELIMITERS, BadCsv, column_name, read_csv_text, read_records, unescape_cell
from shards.errors import DataError, describe_unreadable, suggest_near
from shards.sample_index import SampleIndex
from trainer.loading.sample_order import Ids

EXCLUDED = -1
"""The label of a sample that `labels.corrections` excludes."""

_KEY, _CHECKED = "key", "checked"
_WRITTEN, _GIVEN = ("corrected_label", "label"), "given_label"
_LABELS = (*_WRITTEN, _GIVEN)  # of a row's cells in these columns, the first non-empty counts
_YES, _NO = ("true", "yes", "y", "x", "1"), ("false", "no", "n", "0", "")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,9}")  # stricter than int(), which accepts 0_1 and non-ASCII digits


@dataclass(frozen=True, eq=False)
class Corrections:
    """The content of `labels.corrections`: sample_ids, and their new labels in the same order."""

    ids: Ids
    labels: npt.NDArray[np.int64]
    """New label, or EXCLUDED."""
    vouched: npt.NDArray[np.bool_]
    """Whether the row says that its label is right, even if it is the one that the sample had before."""


@dataclass(frozen=True)
class _Row:
    """A row of a CSV file. label: empty if all of its label cells are; vouched: see Corrections."""

    line: int
    sample_id: int
    label: str
    vouched: bool


def read_label_file(path: Path, index: SampleIndex) -> npt.NDArray[np.int64]:
    """Read labels by sample_id; raises DataError unless every sample has exactly one valid label."""
    file = _LabelFile("labels.file", path, index)
    if file.delimiter is None:
        return file.parse_lines()
    labels, seen = np.full(len(index), EXCLUDED, np.int64), np.zeros(len(index), bool)
    for row in file.rows():
        labels[row.sample_id] = file.parse_label(row.line, row.label, row.sample_id)
        seen[row.sample_id] = True
    missing = np.flatnonzero(~seen)
    if len(missing):
        some = ", ".join(repr(key) for key in index.keys(missing[:3]))
        raise DataError(
            f"labels.file {path} lacks {len(missing)} of {len(index)} keys, for example {some}: add them, or name "
            "the file in labels.corrections, which may have some of the keys"
        )
    return labels


def read_corrections(path: Path, index: SampleIndex) -> Corrections:
    """Read the corrected labels of some samples; raises DataError if a key or a label is not valid."""
    file = _LabelFile("labels.corrections", path, index)
    rows = list(file.rows())
    if not rows:
        raise DataError(f"labels.corrections {path} has no rows: write key,label, or set labels.corrections to null")
    labels = [file.parse_label(row.line, row.label, row.sample_id) if row.label else EXCLUDED for row in rows]
    return Corrections(
        np.array([row.sample_id for row in rows], np.int64),
        np.array(labels, np.int64),
        np.array([row.vouched and label != EXCLUDED for row, label in zip(rows, labels, strict=True)], bool),
    )


def file_checksum(path: Path, name: str) -> str:
    """Return the SHA-256 of a file. name: the recipe key of the file, for the error message."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(describe_unreadable(name, path, error)) from error


class _LabelFile:
    """A CSV file of keys and labels, or a file with one label per line; every error names the file and the line."""

    def __init__(self, name: str, path: Path, index: SampleIndex) -> None:
        """name: the recipe key of the file."""
        self._name, self._path, self._index = name, path, index
        self._text = read_csv_text(path, name)
        self._class_of = {class_name: label for label, class_name in enumerate(index.class_names)}
        # If classes are named by numbers other than their own, as the folders 1 and 2, a number can only be a name.
        self._has_numbers = all(
            not _WHOLE_NUMBER.fullmatch(class_name) or class_name == str(label)
            for class_name, label in self._class_of.items()
        )
        first = next((line for line in io.StringIO(self._text) if line.strip()), "")
        self._has_header, self.delimiter = _recognise(first)

    def rows(self) -> Iterator[_Row]:
        """Yield the rows of the CSV file; raises DataError for an unknown key or one that occurs twice.

        A row of labels_review.csv without a decision may have an unknown key: it is left out.
        """
        id_of = {key: sample_id for sample_id, key in enumerate(self._index.keys())}
        first_line = np.zeros(len(self._index), np.int64)
        columns, width = {_KEY: 0, "label": 1}, 2
        header = self._has_header
        for line, cells in self._records():
            if header:
                header, width = False, len(cells)
                names = [column_name(cell) for cell in cells]
                columns = {name: names.index(name) for name in names}
                continue
            if len(cells) != width:
                expected = f"the {width} cells of the header" if self._has_header else "key,label"
                raise self._error(line, f"expected {expected}, found {','.join(cells)[:80]!r}")
            labels = {name: cells[columns[name]] for name in _LABELS if name in columns}
            filled = {name: label for name, label in labels.items() if label.strip()}
            vouched = self._parse_mark(line, cells[columns[_CHECKED]]) if _CHECKED in columns else False
            vouched |= any(name in filled for name in _WRITTEN)
            sample_id = _find(id_of, cells[columns[_KEY]])
            if sample_id is None:
                is_list = self._name == "labels.corrections" and _WRITTEN[0] in columns
                if is_list and filled.keys() == {_GIVEN} and not vouched:
                    continue  # a row of the list without a decision, whose image is gone
                raise self._unknown_key(line, cells[columns[_KEY]])
            if first_line[sample_id]:
                key = self._key(sample_id)
                raise self._error(line, f"key {key!r} occurs twice, first on line {first_line[sample_id]}")
            first_line[sample_id] = line
            yield _Row(line, sample_id, next(iter(filled.values()), ""), vouched)

    def parse_lines(self) -> npt.NDArray[np.int64]:
        """Return the labels of a file with one label per line, in the order of the source."""
        lines = [(number, line) for number, line in enumerate(self._text.splitlines(), 1) if line.strip()]
        if len(lines) != len(self._index):
            raise DataError(
                f"{self._name} {self._path} has {len(lines)} labels, but the data set has {len(self._index)} "
                "samples: write one label per line in the source's order, or a CSV with the columns key,label"
            )
        labels = [self.parse_label(number, line, row) for row, (number, line) in enumerate(lines)]
        return np.asarray(labels, np.int64)

    def parse_label(self, line: int, text: str, sample_id: int) -> int:
        """Return the class with this name or number."""
        label = _find(self._class_of, text)
        if label is not None:
            return label
        number = unescape_cell(text.strip())
        if not self._has_numbers or not _WHOLE_NUMBER.fullmatch(number):
            raise self._unknown_class(line, text.strip(), sample_id)
        if not 0 <= int(number) < self._index.num_classes:
            classes = f"0..{self._index.num_classes - 1}"
            raise self._error(line, f"label {number} of {self._key(sample_id)!r} is outside {classes}")
        return int(number)

    def _parse_mark(self, line: int, cell: str) -> bool:
        """Return whether a cell of the column `checked` says yes."""
        mark = cell.strip().lower()
        if mark not in (*_YES, *_NO):
            raise self._error(line, f"{cell[:40]!r} in the column `checked`: write true, or leave the cell empty")
        return mark in _YES

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each record of the CSV file that is not blank, with the number of its first line."""
        try:
            yield from read_records(self._text, self.delimiter or ",")
        except BadCsv as problem:
            raise self._error(problem.line, str(problem)) from None

    def _key(self, sample_id: int) -> str:
        return self._index.keys(np.array([sample_id]))[0]

    def _error(self, line: int, problem: str) -> DataError:
        return DataError(f"{self._name} {self._path}, line {line}: {problem}")

    def _unknown_key(self, line: int, key: str) -> DataError:
        known = ", ".join(repr(each) for each in self._index.keys(np.arange(min(2, len(self._index)))))
        return self._error(
            line,
            f"the data set has no key {key[:80]!r}; keys look like {known} (a header, if there is one, must be "
            "key,label, or contain these names). If the file was moved or removed, delete its row",
        )

    def _unknown_class(self, line: int, text: str, sample_id: int) -> DataError:
        key, classes = self._key(sample_id), self._index.class_names
        if self._has_numbers:
            problem = "is neither a class number nor a class name"
            some = [f"{number} = {name}" for number, name in enumerate(classes[:5])]
        else:
            problem = "is not a class name (class numbers are not accepted, because names are numbers, too)"
            some = list(classes[:5])
        shown = ", ".join(some) + (", ..." if len(classes) > 5 else "")
        folded = {name.casefold(): name for name in classes}
        hint = suggest_near(text.casefold(), folded, most=1, show=lambda name: repr(folded[name]))
        exclude = "" if self._name == "labels.file" else ". To exclude a sample, leave all its labels empty"
        known = f"{hint}{' ' if hint else ''}classes are {shown}"
        return self._error(line, f"{text[:40]!r}, the label of {key!r}, {problem}; {known}{exclude}")


def _recognise(line: str) -> tuple[bool, str | None]:
    """Return whether a file's first line is a header, and the delimiter; None if the file has no columns."""
    for delimiter in DELIMITERS:
        names = [column_name(cell) for cell in line.split(delimiter)]
        if _KEY in names and any(name in names for name in _LABELS):
            return True, delimiter
    return False, "," if "," in line else None


def _find(known: Mapping[str, int], cell: str) -> int | None:
    """Look up a cell that may be escaped (shards/csv_file.py) and may have spaces around it."""
    for text in (cell, cell.strip()):
        for name in (unescape_cell(text), text):
            if name in known:
                return known[name]
    return None
