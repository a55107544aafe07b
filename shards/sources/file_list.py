"""Lists of `PATH LABEL` lines: millions of rows, kept as the bytes of the file and where each row lies in them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import DataError
from shards.sources.inside import open_inside
from shards.sources.source import SUFFIXES
from shards.sources.tar_members import FileState, locate, open_tar

_LARGEST_LIST = 2**30
_LONGEST_LINE = 4096
_NEWLINE, _RETURN, _SPACE, _SLASH, _DOT = b"\n\r /."
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFile:
    """A text file in a folder, or inside a tar: where it lies, and what tells that it is still the same."""

    root: Path
    path: str  # under root, of the file itself or of the tar
    offset: int
    nbytes: int
    state: FileState
    name: str  # what its publisher calls it, wherever it lies: "info/synsets.txt"

    @property
    def shown(self) -> str:
        """Its name in errors, which says that it lies in a tar."""
        return self.name if self.name == self.path else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        place = self.root / self.path
        with open_inside(self.root, self.path, self.name) if self.name == self.path else open_tar(place) as file:
            if FileState.of(file) != self.state:
                raise DataError(f"{place} has changed since it was read; run the same command again")
            try:
                data = os.pread(file.fileno(), self.nbytes, self.offset)
            except OSError as error:
                raise DataError(f"{place} cannot be read: {error.strerror}") from error
        if len(data) != self.nbytes:
            raise DataError(f"{place} cannot be read to its end; run the same command again")
        return data


def text_file(root: Path, path: str) -> TextFile:
    """The text file ROOT/path."""
    with open_inside(root, path, path) as file:
        state = FileState.of(file)
    return _capped(TextFile(root, path, 0, state.nbytes, state, path))


def text_files_in_tar(root: Path, tar: str, paths: list[str], home: str) -> dict[str, TextFile]:
    """Those of `paths` that the tar ROOT/tar holds."""
    places = locate(root / tar, {path: row for row, path in enumerate(paths)}, home)
    return {
        path: _capped(TextFile(root, tar, int(offset), int(nbytes), places.state, path))
        for path, offset, nbytes in zip(paths, places.offsets, places.nbytes, strict=True)
        if offset >= 0
    }


def _capped(text: TextFile) -> TextFile:
    if text.nbytes > _LARGEST_LIST:
        raise DataError(f"{text.root / text.shown} has {text.nbytes:,} bytes; no list of images is that long")
    return text


def text_lines(text: TextFile) -> list[str]:
    """The lines of a small text file, without the blank ones at its end."""
    content = _checked_text(text)
    return [line.removesuffix("\r") for line in content.decode().rstrip().split("\n")] if content else []


class FileList:
    """The rows of a list: row i is line i + 1. It travels as the place of its file and is read again there."""

    def __init__(self, text: TextFile) -> None:
        self._text = text
        self._content = _checked_text(text)
        self._starts, self._stops, self.labels = _rows(self._content, text)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileList, (self._text,)

    def __len__(self) -> int:
        return len(self._starts)

    def path(self, row: int) -> str:
        return self._content[self._starts[row] : self._stops[row]].decode()

    def origin(self, row: int) -> str:
        return f"{self._text.name} line {row + 1}"

    def check(self, prefix: str, classes: int) -> None:
        """All rows are images under `prefix`, with labels below `classes`, and none is there twice."""
        if len(self) == 0:
            raise DataError(f"{self._text.shown} in {self._text.root} is empty; bring the whole list")
        if prefix:
            self._refuse_first(~self._starts_with(prefix.encode()), f"the path does not begin with {prefix}")
        self._refuse_unclean()
        self._refuse_first(~self._has_image_suffix(), "the path does not end in .jpg, .jpeg or .png after a name")
        high = self.labels >= classes
        if high.any():
            row = int(high.argmax())
            self._refuse(row, f"label {self.labels[row]}, and synsets.txt has the classes 0..{classes - 1}")
        self._refuse_repeated()

    def _starts_with(self, prefix: bytes) -> np.ndarray:
        content = np.frombuffer(self._content, np.uint8)
        same = self._stops - self._starts > len(prefix)
        for place, byte in enumerate(prefix):
            same[same] = content[self._starts[same] + place] == byte
        return same

    def _has_image_suffix(self) -> np.ndarray:
        content = np.frombuffer(self._content, np.uint8)
        found = np.zeros(len(self), dtype=bool)
        for suffix in SUFFIXES:
            same = self._stops - self._starts > len(suffix)
            for place, letter in enumerate(reversed(suffix.encode()), start=1):
                byte = content[self._stops[same] - place]
                same[same] = (byte == letter) | (byte == ord(chr(letter).upper()))
            same[same] = content[self._stops[same] - len(suffix) - 1] != _SLASH  # the suffix is no name by itself
            found |= same
        return found

    def _refuse_unclean(self) -> None:
        """Empty, `.` and `..` parts: they leave the folder, or name one file in two ways."""
        text = b"\n" + self._content
        for part in (b"", b".", b".."):
            for before in (b"\n", b"/"):
                if (place := text.find(before + part + b"/")) >= 0:
                    row = int(np.searchsorted(self._starts, place, "right")) - 1
                    self._refuse(max(row, 0), "the path is absolute or has empty, '.' or '..' parts")

    def _refuse_repeated(self) -> None:
        """Paths are compared without their suffix, as keys are."""
        hashes = self._stem_hashes()
        order = np.argsort(hashes, kind="stable")
        repeated = np.flatnonzero(np.diff(hashes[order]) == 0)
        for place in repeated[np.argsort(order[repeated + 1])]:  # the first in the list is named
            first, second = int(order[place]), int(order[place + 1])
            if stem(self.path(first)) == stem(self.path(second)):
                self._refuse(second, f"the same image as line {first + 1}")

    def _stem_hashes(self) -> np.ndarray:
        """int64 [n]: equal for equal stems; Python's own hash, which holds for this process only."""
        content = self._content
        dots = self._stops - 4 - (np.frombuffer(content, np.uint8)[self._stops - 4] != _DOT)
        bounds = zip(self._starts.tolist(), dots.tolist(), strict=True)
        return np.fromiter((hash(content[start:stop]) for start, stop in bounds), np.int64, len(self))

    def _refuse_first(self, bad: np.ndarray, problem: str) -> None:
        if bad.any():
            self._refuse(int(bad.argmax()), problem)

    def _refuse(self, row: int, problem: str) -> None:
        raise refusal(self._text, row + 1, self.path(row), problem)


def stem(path: str) -> str:
    """`path` without its image suffix."""
    return path.rpartition(".")[0]


def refusal(text: TextFile, line: int, content: str, problem: str) -> DataError:
    return DataError(
        f"{text.shown} line {line} ({content[:200]!r}) in {text.root}: {problem}. "
        "Correct the line, or bring the list again from where it was published"
    )


def _checked_text(text: TextFile) -> bytes:
    """The bytes of the file, known to be UTF-8 without NUL bytes and overlong lines."""
    content = text.read().removeprefix(_BYTE_ORDER_MARK)
    if (place := content.find(b"\0")) >= 0:
        raise _refusal_at(text, content, place, "a NUL byte")
    if not content.isascii():
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _refusal_at(text, content, error.start, "not UTF-8") from None
    starts, stops = _line_bounds(content)
    if len(starts) and int((stops - starts).max()) > _LONGEST_LINE:
        row = int((stops - starts > _LONGEST_LINE).argmax())
        raise _refusal_at(text, content, int(starts[row]), f"{stops[row] - starts[row]:,} bytes long")
    return content


def _refusal_at(text: TextFile, content: bytes, place: int, problem: str) -> DataError:
    start = content.rfind(b"\n", 0, place) + 1
    shown = content[start : start + 200].split(b"\n")[0].decode("utf-8", "backslashreplace")
    return refusal(text, content.count(b"\n", 0, place) + 1, shown, problem)


def _line_bounds(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops), int64 [lines] each, without line ends and without the blank lines at the end."""
    content = content.rstrip()
    if not content:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    array = np.frombuffer(content, np.uint8)
    ends = np.append(np.flatnonzero(array == _NEWLINE), len(array))
    starts = np.append(0, ends[:-1] + 1)
    has_return = (ends > starts) & (array[np.maximum(ends - 1, 0)] == _RETURN)
    return starts, ends - has_return


def _rows(content: bytes, text: TextFile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(starts of paths, stops of paths, labels int32): a line is cut at its last space."""
    starts, ends = _line_bounds(content)
    array = np.frombuffer(content, np.uint8)
    spaces = np.append(-1, np.flatnonzero(array == _SPACE))
    stops = spaces[np.searchsorted(spaces, ends) - 1]
    widths = ends - stops - 1
    bad = (stops <= starts) | (widths < 1) | (widths > 9)
    labels = np.zeros(len(starts), np.int32)
    for place in range(int(widths[~bad].max(initial=0))):
        within = np.flatnonzero(~bad & (widths > place))
        digits = array[stops[within] + 1 + place].astype(np.int32) - ord("0")
        bad[within] |= (digits < 0) | (digits > 9)
        labels[within] = labels[within] * 10 + digits
    if bad.any():
        row = int(bad.argmax())
        line = content[starts[row] : ends[row]].decode()
        raise refusal(text, row + 1, line, "not a path, a space and the number of a class")
    return starts, stops, labels
