"""Opens and replaces regular files only: no device, FIFO, socket, folder or, to write, link."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from shards.errors import DataError

_KINDS = (
    (stat.S_ISLNK, "a link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def find_kind(path: Path, follow: bool = False) -> str | None:
    """Return what is at `path` if it is not a regular file (`a FIFO`); None if it is one, or if nothing is there."""
    try:
        return _name_kind(path.stat(follow_symlinks=follow).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def require_regular(path: Path) -> None:
    """Raise DataError if there is anything but a regular file in the place of an output."""
    if kind := find_kind(path):
        raise DataError(f"cannot write {path}: it is {kind}, not a regular file; choose another place, or remove it")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, without waiting for a FIFO; raises DataError if it is something else.

    A link is followed to read, and refused to write; so is a file with more names to write only, which may be another
    program's. A lock, which is opened to read and write, stays as it is.
    """
    reads = not flags & (os.O_WRONLY | os.O_RDWR)
    # before it is opened, which is an action on some devices; and of what was opened, in case it has just changed
    if (kind := find_kind(path, follow=reads)) is None:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (0 if reads else os.O_NOFOLLOW), 0o666)
        status = os.fstat(descriptor)
        kind = _name_kind(status.st_mode)
        if kind is None and not (flags & os.O_WRONLY and status.st_nlink > 1):
            return descriptor
        os.close(descriptor)
        if kind is None:
            raise DataError(
                f"{path} is a hard link: what is written to it would change the file under its other names; "
                "remove it, or replace it by a copy"
            )
    if reads and kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise DataError(f"{path} is {kind}, not a regular file; {'name another file' if reads else 'remove it'}")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to it, and create it if it is not there; raises DataError as `open_regular`."""
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def read_regular(path: Path, most: int = -1) -> bytes:
    """Read a file, or its first `most` bytes; raises DataError if it is not a regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)


def _name_kind(mode: int) -> str | None:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)
