"""Reads untrusted text files from a folder or a tar; refuses NUL bytes, overlong lines and text that is not UTF-8."""

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
    """The location of a text file in a folder or tar, and its size and mtime when it was found."""

    root: Path
    path: str  # relative to root; of the file itself or of its tar
    offset: int
    nbytes: int
    state: FileState
    name: str  # published path, even inside a tar: "info/synsets.txt"

    @property
    def shown(self) -> str:
        """Its name for error messages, preceded by its tar if it is in one."""
        return self.name if self.name == self.path else f"{self.path}: {self.name}"

    def read(self) -> bytes:
        place = self.root / self.path
        with open_inside(self.root, self.path, self.name) if self.name == self.path else open_tar(place) as file:
            if FileState.of(file) != self.state:
                raise DataError(f"{place} has changed since this command started; run the same command again")
            try:
                data = os.pread(file.fileno(), self.nbytes, self.offset)
            except OSError as error:
                raise DataError(f"{place} cannot be read: {error.strerror}") from error
        if len(data) != self.nbytes:
            raise DataError(f"{place} is shorter than when this command started; run the same command again")
        return data


def find_text(root: Path, path: str) -> TextFile:
    """Locate the text file ROOT/path; raises DataError if it is missing or too large."""
    with open_inside(root, path, path) as file:
        state = FileState.of(file)
    return _require_size(TextFile(root, path, 0, state.nbytes, state, path))


def find_texts_in_tar(root: Path, tar: str, paths: list[str], home: str) -> dict[str, TextFile]:
    """Locate `paths` in the tar ROOT/tar; returns those that it contains. home: see `locate_members`."""
    places = locate_members(root / tar, {path: row for row, path in enumerate(paths)}, home)
    return {
        path: _require_size(TextFile(root, tar, int(offset), int(nbytes), places.state, path))
        for path, offset, nbytes in zip(paths, places.offsets, places.nbytes, strict=True)
        if offset >= 0
    }


def _require_size(text: TextFile) -> TextFile:
    if text.nbytes > _LARGEST_FILE:
        raise DataError(f"{text.root / text.shown} has {text.nbytes:,} bytes, too many for a list of images")
    return text


def refuse_line(text: TextFile, line: int, content: str, problem: str) -> DataError:
    return DataError(
        f"{text.shown} line {line} ({content[:200]!r}) in {text.root}: {problem}. "
        "Correct the line, or download the list again"
    )


def read_lines(text: TextFile) -> pa.StringArray:
    """Read and check a text file; returns its lines without line ends, and without trailing blank lines."""
    content = text.read().removeprefix(_BYTE_ORDER_MARK)
    if (place := content.find(b"\0")) >= 0:
        raise _refuse_at(text, content, place, "it contains a NUL byte")
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse_at(text, content, error.start, "it is not UTF-8") from None
    content = content.rstrip().replace(b"\r\n", b"\n")
    if not content:
        return pa.array([], pa.string())
    lines = pc.split_pattern(pa.array([content], pa.string()), "\n").values
    lengths = pc.binary_length(lines)
    row = pc.index(pc.greater(lengths, _LONGEST_LINE), True).as_py()
    if row >= 0:
        raise refuse_line(text, row + 1, lines[row].as_py(), f"it is too long ({lengths[row].as_py():,} bytes)")
    return lines


def _refuse_at(text: TextFile, content: bytes, place: int, problem: str) -> DataError:
    start = content.rfind(b"\n", 0, place) + 1
    shown = content[start : start + 200].split(b"\n")[0].decode("utf-8", "backslashreplace")
    return refuse_line(text, content.count(b"\n", 0, place) + 1, shown, problem)
