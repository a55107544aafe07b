"""Reads files from an uncompressed, untrusted tar in place: one pass over the headers, then one pread per file."""

import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from shards.errors import DataError
from shards.image_check import MAX_BYTES
from shards.progress import Progress

_PICKLES = (".pkl", ".pickle")
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}
_COMPRESSIONS = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_LARGEST_EXTRA = 2**14  # bytes of a long name or of a member's attributes, which tarfile holds in memory
_END = bytes(tarfile.BLOCKSIZE)
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


class _BadTar(Exception):
    """The file is not a tar, or is incomplete; the message says what is wrong and where."""


def list_members(tar: Path, show_progress: bool = True) -> Iterator[Member]:
    """Yield the regular files of `tar` in order. Links, devices, pickles and paths with `..` raise DataError."""
    with open_tar(tar) as file:
        try:
            headers = _read_headers(file.fileno())
            for info in _report_progress(tar, file, headers) if show_progress else headers:
                name = _require_harmless(tar, info)
                if info.isfile():
                    yield Member(name, info.offset_data, info.size)
        except _BadTar as problem:
            raise DataError(
                f"{tar} is damaged, truncated or not a tar: {problem}. Compare its size with the published one, "
                "and download it again"
            ) from None
        except OSError as error:
            raise DataError(f"{tar} cannot be read: {error.strerror}") from error


def _report_progress(tar: Path, file: IO[bytes], headers: Iterator[tarfile.TarInfo]) -> Iterator[tarfile.TarInfo]:
    with Progress(f"list {tar.name}", FileState.of(file).nbytes, unit="bytes") as progress:
        for number, info in enumerate(headers):
            if number % _MEMBERS_PER_UPDATE == 0:
                progress.advance(info.offset_data - progress.done)
            yield info


class _HeaderFile(io.FileIO):
    """Gives tarfile the blocks of headers, but never more than a header may take."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_EXTRA:
            raise _BadTar(f"the header before byte {self.tell():,} is too large")
        return super().read(size) or b""


def _read_headers(descriptor: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an open tar in order; raises _BadTar if it is damaged or has no end marker."""
    with _HeaderFile(descriptor, closefd=False) as file:
        try:
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else it holds all headers in memory
                if info.size < 0:
                    raise _BadTar(f"invalid size in the header at byte {info.offset:,}")
                if {"path", "size"} & tar.pax_headers.keys():
                    raise _BadTar("a global header sets one path or size for all members")
                yield info
        except (_BadTar, OSError):
            raise
        except Exception as error:  # tarfile raises ValueError, IndexError and others for forged headers
            raise _BadTar(str(error) or type(error).__name__) from None
        # tarfile takes a damaged header for the end
        if os.pread(descriptor, tarfile.BLOCKSIZE, tar.offset) != _END:
            raise _BadTar(f"neither a valid header nor an end marker at byte {tar.offset:,}")


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


def _require_harmless(tar: Path, info: tarfile.TarInfo) -> str:
    """Return the name of a file or folder, without a leading `./`; refuse other types and unsafe names."""
    name = info.name
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    problem = _find_problem(info, name)
    if problem:
        shown = name[:200].encode(errors="backslashreplace").decode()
        raise DataError(f"{tar}: the member {shown!r} {problem}. Do not trust this tar; download it again")
    return name


def _find_problem(info: tarfile.TarInfo, name: str) -> str:
    if info.issparse() or any(key.startswith("GNU.sparse") for key in info.pax_headers):
        return "is a sparse file"
    if not info.isfile() and not info.isdir():
        return f"is {_KINDS.get(info.type, f'of the unknown type {info.type!r}')}"
    if name.startswith("/"):
        return "has an absolute path"
    if ".." in name.split("/"):
        return "has a path with '..', which leaves the folder"
    if "\0" in name:
        return "has a NUL byte in its name"
    if not name.isascii() and any("\udc80" <= letter <= "\udcff" for letter in name):
        return "has a name that is not UTF-8"
    if name.lower().endswith(_PICKLES):
        return "is a pickle, which could run code"
    return ""
