"""Untrusted text files, in a folder or inside a tar: UTF-8 without NUL bytes and overlong lines."""

import os
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from shards.errors import DataError
from shards.sources.inside import open_inside
from shards.sources.tar_members import FileState, locate_members, open_tar

_LARGEST_FILE = 2**30
_LONGEST_LINE = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TextFile:
    """A text file in a folder or inside a tar: its position, and its state when it was found."""

    root: Path
    path: str  # under root, of the file itself or of the tar
    offset: int
    nbytes: int
    state: FileState
    name: str  # as published, also inside a tar: "info/synsets.txt"

    @property
    def shown(self) -> str:
        """Its name in errors, with the tar it is in."""
        return self.name if self.name == self.path else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        place = self.root / self.path
        with open_inside(self.root, self.path, self.name) if self.name == self.path else open_tar(place) as file:
            if FileState.of(file) != self.state:
                raise DataError(f"{place} has changed since it was found; run the same command again")
            try:
                data = os.pread(file.fileno(), self.nbytes, self.offset)
            except OSError as error:
                raise DataError(f"{place} cannot be read: {error.strerror}") from error
        if len(data) != self.nbytes:
            raise DataError(f"{place} is shorter than before; run the same command again")
        return data


def find_text(root: Path, path: str) -> TextFile:
    """The text file ROOT/path."""
    with open_inside(root, path, path) as file:
        state = FileState.of(file)
    return _require_size(TextFile(root, path, 0, state.nbytes, state, path))


def find_texts_in_tar(root: Path, tar: str, paths: list[str], home: str) -> dict[str, TextFile]:
    """Those of `paths` that the tar ROOT/tar holds."""
    places = locate_members(root / tar, {path: row for row, path in enumerate(paths)}, home)
    return {
        path: _require_size(TextFile(root, tar, int(offset), int(nbytes), places.state, path))
        for path, offset, nbytes in zip(paths, places.offsets, places.nbytes, strict=True)
        if offset >= 0
    }


def _require_size(text: TextFile) -> TextFile:
    if text.nbytes > _LARGEST_FILE:
        raise DataError(f"{text.root / text.shown} has {text.nbytes:,} bytes; lists of images are shorter")
    return text


def refuse_line(text: TextFile, line: int, content: str, problem: str) -> DataError:
    return DataError(
        f"{text.shown} line {line} ({content[:200]!r}) in {text.root}: {problem}. "
        "Correct the line, or download the list again"
    )


def read_lines(text: TextFile) -> pa.StringArray:
    """The lines of the file, checked, without line ends and without the blank ones at its end."""
    content = text.read().removeprefix(_BYTE_ORDER_MARK)
    if (place := content.find(b"\0")) >= 0:
        raise _refuse_at(text, content, place, "a NUL byte")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse_at(text, content, error.start, "not UTF-8") from None
    content = content.rstrip().replace(b"\r\n", b"\n")
    if not content:
        return pa.array([], pa.string())
    lines = pc.split_pattern(pa.array([content], pa.string()), "\n").values
    lengths = pc.binary_length(lines)
    row = pc.index(pc.greater(lengths, _LONGEST_LINE), True).as_py()
    if row >= 0:
        raise refuse_line(text, row + 1, lines[row].as_py(), f"{lengths[row].as_py():,} bytes long")
    return lines


def _refuse_at(text: TextFile, content: bytes, place: int, problem: str) -> DataError:
    start = content.rfind(b"\n", 0, place) + 1
    shown = content[start : start + 200].split(b"\n")[0].decode("utf-8", "backslashreplace")
    return refuse_line(text, content.count(b"\n", 0, place) + 1, shown, problem)
