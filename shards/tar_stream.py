"""Writes and reads plain tars in one sequential pass and hashes their bytes."""

import hashlib
import tarfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shards.image_check import MAX_BYTES

BLOCK = tarfile.BLOCKSIZE
_NAME, _SIZE, _KIND = slice(0, 100), slice(124, 136), slice(156, 157)  # fields of a header block
_PLAIN_FILE = b"0"
_READ_BYTES = 2**20


class ShardTar:
    """Writes a tar with WebDataset's writer; all header fields other than name and size are constant."""

    def __init__(self, file: BinaryIO) -> None:
        from webdataset import TarWriter  # imported here: it imports torch, which takes seconds

        self._hashed = _Hashed(file)
        self._tar = TarWriter(
            self._hashed, encoder=False, compress=False, user="incv", group="incv", mode=0o444, mtime=0
        )

    def add(self, key: str, suffix: str, data: bytes) -> int:
        """Append a member; return the offset of its first byte."""
        offset: int = self._tar.tarstream.offset + BLOCK
        self._tar.write({"__key__": key, suffix: data})
        assert self._tar.tarstream.offset == offset + len(data) + -len(data) % BLOCK, (
            "the header takes more than one block"
        )
        return offset

    def finish(self) -> str:
        """Finish the tar and return its SHA-256."""
        self._tar.close()
        return self._hashed.digest.hexdigest()

    def __enter__(self) -> "ShardTar":
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):  # e.g. a full disk, which an earlier write has reported
            self._tar.close()


class _Hashed:
    """A file object that hashes everything written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self.digest.update(piece)
        return self._file.write(piece)


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class TarContent:
    """Checksum and members of a tar. is_whole: every byte belongs to a regular file or to the end marker."""

    sha256: str
    members: list[Member]
    is_whole: bool


def read_tar(path: Path) -> TarContent:
    """Read a tar, holding at most one image in memory, even if headers are forged. Raises OSError."""
    digest, members = hashlib.sha256(), []
    with path.open("rb") as file:
        while member := _next_member(file, digest):
            members.append(member)
        rest = zeros = 0
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            rest += len(piece)
            zeros += piece.count(0)
    return TarContent(digest.hexdigest(), members, is_whole=rest == zeros and rest >= 2 * BLOCK)


def _next_member(file: BinaryIO, digest: "hashlib._Hash") -> Member | None:
    """Read the next regular file and update `digest`; if there is none, return None and restore the position."""
    start = file.tell()
    header = file.read(BLOCK)
    size = _size(header)
    content = file.read(size + -size % BLOCK) if size is not None else b""
    if size is None or len(content) < size + -size % BLOCK:
        file.seek(start)
        return None
    digest.update(header)
    digest.update(content)
    name = header[_NAME].split(b"\0", 1)[0].decode(errors="replace")
    return Member(name, start + BLOCK, size, zlib.crc32(memoryview(content)[:size]))


def _size(header: bytes) -> int | None:
    if len(header) < BLOCK or header[_KIND] != _PLAIN_FILE:
        return None
    try:
        size = int(header[_SIZE].strip(b"\0 "), 8)
    except ValueError:
        return None
    return size if 0 <= size <= MAX_BYTES else None
