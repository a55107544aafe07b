"""File lists with lines `PATH LABEL`, kept as Arrow arrays, because they can have millions of rows."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.errors import DataError
from shards.image_formats import SUFFIXES
from shards.sources.text_file import TextFile, read_lines, refuse_line

_ROW = r"(?s). [0-9]{1,9}$"  # a path, which may contain spaces, then a space and a label that fits into int32
_UNCLEAN = r"(^|/)\.{0,2}/"  # empty, `.` and `..` parts could leave the folder or name a file in two ways
_IMAGE = rf"(?is)[^/]({'|'.join(suffix.replace('.', '[.]') for suffix in SUFFIXES)})$"


class FileList:
    """The rows of a list; row i is line i + 1. Pickling stores only the location; unpickling rereads the file."""

    def __init__(self, text: TextFile) -> None:
        self._text = text
        lines = read_lines(text)
        bad = pc.index(pc.match_substring_regex(lines, _ROW), False).as_py()
        if bad >= 0:
            raise refuse_line(text, bad + 1, lines[bad].as_py(), "expected a path, a space and a class number")
        self._paths, labels = _cut_at_last(lines, " ")
        self.labels: np.ndarray = labels.cast(pa.int32()).to_numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileList, (self._text,)

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, row: int) -> str:
        return self._paths[row].as_py()

    def origin(self, row: int) -> str:
        return f"{self._text.name} line {row + 1}"

    def check(self, prefix: str, classes: int) -> None:
        """Raise DataError unless all rows are distinct images under `prefix` with labels below `classes`."""
        if len(self) == 0:
            raise DataError(f"{self._text.shown} in {self._text.root} is empty; download the whole list")
        begins = pc.and_(pc.starts_with(self._paths, prefix), pc.not_equal(self._paths, prefix))
        self._require(begins, f"the path does not start with {prefix}")
        clean = pc.invert(pc.match_substring_regex(self._paths, _UNCLEAN))
        self._require(clean, "the path is absolute or has empty, '.' or '..' parts")
        image = pc.match_substring_regex(self._paths, _IMAGE)
        self._require(image, "the path does not end in a file name with an image suffix such as .jpg")
        high = self.labels >= classes
        if high.any():
            row = int(high.argmax())
            self._refuse(row, f"label {self.labels[row]}, but synsets.txt has only the classes 0..{classes - 1}")
        self._require_distinct()

    def _require_distinct(self) -> None:
        """Raise DataError if two paths are equal without their suffixes: they would have the same key."""
        stems, _ = _cut_at_last(self._paths, ".")
        # numbered by first appearance: equal to the row number until the first repeat
        first = stems.dictionary_encode().indices.to_numpy()
        repeated = np.flatnonzero(first != np.arange(len(first)))
        if len(repeated):
            self._refuse(int(repeated[0]), f"this is the same image as line {first[repeated[0]] + 1}")

    def _require(self, good: pa.BooleanArray, problem: str) -> None:
        row = pc.index(good, False).as_py()
        if row >= 0:
            self._refuse(row, problem)

    def _refuse(self, row: int, problem: str) -> None:
        raise refuse_line(self._text, row + 1, self.path(row), problem)


def stem(path: str) -> str:
    """Return `path` without its image suffix."""
    return path.rpartition(".")[0]


def _cut_at_last(texts: pa.StringArray, mark: str) -> tuple[pa.StringArray, pa.StringArray]:
    """Split each text at its last `mark`, which every text must contain; return both columns."""
    parts = pc.split_pattern(texts, mark, max_splits=1, reverse=True)
    return pc.list_element(parts, 0), pc.list_element(parts, 1)
