"""Reads images from an uncompressed tar in place: one pass over the headers, then one pread per image."""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from shards.errors import DataError
from shards.image_check import MAX_BYTES
from shards.progress import Progress
from shards.sources.tar_headers import BadTar, Header, read_headers

_PICKLES = (".pkl", ".pickle")
_COMPRESSIONS = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_MEMBERS_PER_UPDATE = 1000


class Member(NamedTuple):
    """A regular file in a tar: its name, without a leading `./`, and the position of its data."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileState:
    """Size and mtime of a file, to detect later changes."""

    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: IO[bytes]) -> "FileState":
        found = os.fstat(file.fileno())
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class MemberLocations:
    """Positions of the wanted files in a tar: int64 [n] arrays; the offset is -1 if the tar lacks the file."""

    offsets: np.ndarray
    nbytes: np.ndarray
    state: FileState  # of the tar

    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.offsets < 0)


def list_members(tar: Path) -> Iterator[Member]:
    """Yield the regular files of `tar` in order. Links, devices, pickles and paths with `..` raise DataError."""
    with open_tar(tar) as file, Progress(f"list {tar.name}", FileState.of(file).nbytes, unit="bytes") as progress:
        try:
            for number, header in enumerate(read_headers(file.fileno())):
                if number % _MEMBERS_PER_UPDATE == 0:
                    progress.advance(header.offset - progress.done)
                if (member := _require_harmless(tar, header)) is not None:
                    yield member
        except BadTar as problem:
            raise DataError(
                f"{tar} is damaged, truncated or not a tar: {problem}. Compare its size with the published one, "
                "and download it again"
            ) from None
        except OSError as error:
            raise DataError(f"{tar} cannot be read: {error.strerror}") from error


def locate_members(tar: Path, wanted: Mapping[str, int], home: str = "") -> MemberLocations:
    """Find files in a tar. wanted: path -> row; member names may have one additional leading folder.

    home: the leading folder of all wanted paths, which member names may omit.
    """
    with open_tar(tar) as file:
        state = FileState.of(file)
    offsets, nbytes = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), np.int64)
    for member in list_members(tar):
        row = wanted.get(member.name)
        if row is None:
            row = wanted.get(member.name.partition("/")[2])
        if row is None and home:
            row = wanted.get(f"{home}/{member.name}")
        if row is None:
            continue
        if offsets[row] >= 0:
            raise DataError(f"{tar} contains {member.name} twice; download the tar again, or extract it")
        offsets[row], nbytes[row] = member.offset, member.nbytes
    return MemberLocations(offsets, nbytes, state)


class TarImages:
    """Reads images at known positions in a tar, by row. Picklable: each process opens the tar itself."""

    def __init__(self, tar: Path, state: FileState, offsets: np.ndarray, nbytes: np.ndarray) -> None:
        self._tar, self._state, self._offsets, self._nbytes = tar, state, offsets, nbytes
        self._file: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def close(self) -> None:
        """Close the tar, if it is open; `read` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, row: int, path: str, origin: str) -> bytes:
        """Read one image, up to one byte more than the size limit, to detect oversized images."""
        if self._file is None:
            file = open_tar(self._tar)
            if FileState.of(file) != self._state:
                file.close()
                raise DataError(f"{self._tar} has changed since it was listed; run the same command again")
            self._file = file
        size = min(int(self._nbytes[row]), MAX_BYTES + 1)
        try:
            data = os.pread(self._file.fileno(), size, int(self._offsets[row]))
        except OSError as error:
            raise DataError(f"{path} ({origin}) cannot be read from {self._tar}: {error.strerror}") from error
        if len(data) != size:
            raise DataError(f"{self._tar} ends inside {path} ({origin}); download it again")
        return data


def open_tar(tar: Path) -> IO[bytes]:
    """Open a tar; raises DataError if it is compressed. Links are allowed: their target is only parsed as a tar."""
    try:
        # without O_NONBLOCK, opening a named pipe would block
        descriptor = os.open(tar, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{tar} cannot be read: {error.strerror}") from error
    file = os.fdopen(descriptor, "rb", buffering=0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise DataError(f"{tar} is not a regular file; an uncompressed tar is expected")
    start = os.pread(descriptor, 8, 0)
    for magic, program in _COMPRESSIONS:
        if start.startswith(magic):
            file.close()
            raise DataError(
                f"{tar} is compressed, so images cannot be read at random positions. "
                f"Decompress it ({program} -dc {tar} > {tar.with_suffix('.plain.tar')}) "
                "and rename the result to the original name"
            )
    return file


def _require_harmless(tar: Path, header: Header) -> Member | None:
    """Return the member if it is a regular file, or None for a folder; refuse any other type and unsafe names."""
    try:
        name = header.name.decode("utf-8")
    except UnicodeDecodeError:
        name = header.name.decode("utf-8", "backslashreplace")
        raise _refuse_member(tar, name, "has a name that is not UTF-8") from None
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    if problem := _problem(header.kind, name):
        raise _refuse_member(tar, name, problem)
    return Member(name, header.offset, header.nbytes) if header.kind == "file" else None


def _problem(kind: str, name: str) -> str:
    if kind not in ("file", "folder"):
        return f"is {kind}"
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name and ".." in name.split("/"):
        return "has a path with '..', which leaves the folder"
    if "\0" in name:
        return "has a NUL byte in its name"
    if name.lower().endswith(_PICKLES):
        return "is a pickle, which could run code"
    return ""


def _refuse_member(tar: Path, name: str, problem: str) -> DataError:
    return DataError(f"{tar}: the member {name[:200]!r} {problem}. Do not trust this tar; download it again")
