"""Images straight from a plain tar: one pass over its headers, then every image is one read at its place."""

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
from shards.sources.tar_headers import BadTar, Header, tar_headers

_PICKLES = (".pkl", ".pickle")
_COMPRESSIONS = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_MEMBERS_BETWEEN_NEWS = 1000


class Member(NamedTuple):
    """A regular file in a tar: its name without a leading `./`, and where its bytes lie."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileState:
    """What tells that a file is still the one that was listed."""

    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, file: IO[bytes]) -> "FileState":
        found = os.fstat(file.fileno())
        return cls(found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Places:
    """Where the wanted files lie in a tar: int64 [n] each, an offset of -1 for one that is not in it."""

    offsets: np.ndarray
    nbytes: np.ndarray
    state: FileState  # of the tar

    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.offsets < 0)


def members(tar: Path) -> Iterator[Member]:
    """The regular files of `tar` in order. Links, devices, pickles and names that leave the folder are errors."""
    with open_tar(tar) as file, Progress(f"list {tar.name}", FileState.of(file).nbytes, unit="bytes") as progress:
        try:
            for number, header in enumerate(tar_headers(file.fileno())):
                if number % _MEMBERS_BETWEEN_NEWS == 0:
                    progress.advance(header.offset - progress.done)
                if (member := _member(tar, header)) is not None:
                    yield member
        except BadTar as problem:
            raise DataError(
                f"{tar} is damaged, cut off or no plain tar: {problem}. Compare its size with the publisher's "
                "and download it again"
            ) from None
        except OSError as error:
            raise DataError(f"{tar} cannot be read: {error.strerror}") from error


def locate(tar: Path, wanted: Mapping[str, int], home: str = "") -> Places:
    """The places of the `wanted` paths (path -> row); members may be named with one folder more in front.

    home: the folder that all wanted paths begin with and that the members may leave out.
    """
    with open_tar(tar) as file:
        state = FileState.of(file)
    offsets, nbytes = np.full(len(wanted), -1, np.int64), np.zeros(len(wanted), np.int64)
    for member in members(tar):
        row = wanted.get(member.name)
        if row is None:
            row = wanted.get(member.name.partition("/")[2])
        if row is None and home:
            row = wanted.get(f"{home}/{member.name}")
        if row is None:
            continue
        if offsets[row] >= 0:
            raise DataError(f"{tar} holds {member.name} twice; download it again, or extract it and keep one")
        offsets[row], nbytes[row] = member.offset, member.nbytes
    return Places(offsets, nbytes, state)


class TarImages:
    """The images at known places of a tar, by row; safe in any process, and light to send to one."""

    def __init__(self, tar: Path, state: FileState, offsets: np.ndarray, nbytes: np.ndarray) -> None:
        self._tar, self._state, self._offsets, self._nbytes = tar, state, offsets, nbytes
        self._file: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def read(self, row: int, path: str, origin: str) -> bytes:
        """At most one byte more than an image may have: enough to be found oversized."""
        if self._file is None:
            file = open_tar(self._tar)
            if FileState.of(file) != self._state:
                file.close()
                raise DataError(f"{self._tar} has changed since its list was made; run the same command again")
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
    """`tar`, open, after a look at its first bytes. It may be a link: where it leads, nothing but a tar is read."""
    try:
        # without O_NONBLOCK a named pipe in place of the file would be waited for
        descriptor = os.open(tar, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise DataError(f"{tar} cannot be read: {error.strerror}") from error
    file = os.fdopen(descriptor, "rb", buffering=0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise DataError(f"{tar} is not a file; a plain tar is expected there")
    start = os.pread(descriptor, 8, 0)
    for magic, program in _COMPRESSIONS:
        if start.startswith(magic):
            file.close()
            raise DataError(
                f"{tar} is compressed, and no image could be found in it without unfolding the whole. "
                f"Unpack it first: {program} -dc {tar} > {tar.with_suffix('.plain.tar')}, and put that in its place"
            )
    return file


def _member(tar: Path, header: Header) -> Member | None:
    """The member if it is a regular file, None for a folder; what has no place in a set of images is refused."""
    try:
        name = header.name.decode("utf-8")
    except UnicodeDecodeError:
        name = header.name.decode("utf-8", "backslashreplace")
        raise _distrust(tar, name, "has a name that is not UTF-8") from None
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    if problem := _problem(header.kind, name):
        raise _distrust(tar, name, problem)
    return Member(name, header.offset, header.nbytes) if header.kind == "file" else None


def _problem(kind: str, name: str) -> str:
    if kind not in ("file", "folder"):
        return f"is {kind}"
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name and ".." in name.split("/"):
        return "leaves the folder it is unpacked in ('..')"
    if "\0" in name:
        return "has a NUL byte in its name"
    if name.lower().endswith(_PICKLES):
        return "is a pickle, which could run code"
    return ""


def _distrust(tar: Path, name: str, problem: str) -> DataError:
    return DataError(f"{tar}: the member {name[:200]!r} {problem}. Do not trust this tar; download it again")
