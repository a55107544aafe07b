"""Atomic, durable writes: write a temporary file, fsync it, rename it, fsync the folder."""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shards.errors import ConfigError, DataError
from shards.regular_file import find_kind, open_regular, read_regular, require_regular

_UNWRITABLE = (
    errno.EBUSY,
    errno.ELOOP,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.ESTALE,
)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert the OSError of a full or unwritable disk to a DataError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the disk is full: {path} could not be written, and no partial file was kept. "
                "Free some space and run the same command again"
            ) from error
        if error.errno in _UNWRITABLE:
            raise DataError(f"cannot write {path}: {error.strerror}; choose another folder") from error
        raise


def sync(path: Path) -> None:
    """fsync a file, or a folder after a rename in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LEFTOVER = re.compile(r"\..*\.tmp\d+(\.old)?")


def _temporary(path: Path) -> Path:
    """Return a hidden, unique temporary name for `path`, in the same folder.

    It contains a random number, because containers and machines that share a folder may have equal process ids.
    """
    return path.with_name(f".{path.name}.tmp{int.from_bytes(os.urandom(6), 'big')}")


def is_temporary(path: Path) -> bool:
    """Whether this is the temporary name of a file or folder that is being written, or whose writer was killed."""
    return _LEFTOVER.fullmatch(path.name) is not None


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed processes, in subfolders too. The caller must be the only writer.

    A folder that was moved aside to be replaced, and was not, is put back.
    """
    for path in list(folder.rglob(".*")):
        _remove_leftover(path)


def remove_leftovers_of(path: Path) -> None:
    """Delete what killed writers of `path` have left beside it. The caller must be the only writer."""
    with disk_errors(path):
        for found in list(path.parent.glob(f".{glob.escape(path.name)}.tmp*")):
            _remove_leftover(found)


def _remove_leftover(path: Path) -> None:
    if not is_temporary(path):
        return
    target = path.with_name(path.name[1:].rpartition(".tmp")[0])
    kind = find_kind(path)
    if path.suffix == ".old" and kind == "a folder" and not os.path.lexists(target):
        os.replace(path, target)
    elif kind == "a folder":
        shutil.rmtree(path)
    elif kind is None:
        path.unlink(missing_ok=True)


def _make_folder(folder: Path, target: Path) -> None:
    """Create a folder with its parents, in order to write `target`; raises DataError if something is in the way."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise DataError(f"cannot write {target}: {folder} is a file, not a folder; choose another folder") from None
    except FileNotFoundError as error:  # in a virtual file system, such as /proc
        raise DataError(f"cannot write {target}: {error.strerror}; choose another folder") from None


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file next to `path`, then rename it to `path`, which replaces a regular file only.

    The caller knows that a file there is its own: from its folder, or by `require_own`.
    """
    with disk_errors(path):
        require_regular(path)
        _make_folder(path.parent, path)
        temporary = _temporary(path)
        try:
            write(temporary)
            sync(temporary)
            require_regular(path)
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            with suppress(FileNotFoundError):
                temporary.unlink()
            raise


def require_own(path: Path, start: bytes, force: bool, fix: str) -> None:
    """Raise InputError unless nothing is at `path`, or `force` may replace what is: an earlier output of the command.

    start: how each of its outputs begins. fix: such as "choose another --out".
    """
    with disk_errors(path):
        if kind := find_kind(path):
            raise ConfigError(f"{path} is {kind}, not a regular file: {fix}")
        if not path.exists():
            return
        if not begins_with(path, start):
            raise ConfigError(f"{path} exists and was not written by this command: {fix}, or remove the file first")
        if not force:
            raise ConfigError(f"{path} exists: {fix}, or replace it with --force")


def require_replaceable(path: Path, start: bytes, force: bool, what: str, fix: str) -> None:
    """Raise InputError unless nothing is at `path`, or an earlier output, or `force` may replace another file.

    start: how each output begins. what: such as "page of `incv compare`". fix: such as "choose another --html".
    """
    with disk_errors(path):
        require_regular(path)
        if not force and path.exists() and not begins_with(path, start):
            raise ConfigError(f"{path} is no {what}: {fix}, or replace it with --force")


def begins_with(path: Path, start: bytes) -> bool:
    return read_regular(path, len(start)) == start


def write_bytes(path: Path, content: bytes) -> None:
    def write(temporary: Path) -> None:
        temporary.write_bytes(content)

    write_atomically(path, write)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_parquet(path: Path, table: pa.Table) -> None:
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)

    write_atomically(path, write)


def list_missing(folder: Path) -> list[Path]:
    """Return those of the folder and its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


@contextmanager
def remove_on_error(folders: Sequence[Path], *errors: type[Exception]) -> Iterator[None]:
    """If the block raises one of these errors, remove the first folder and, if they are then empty, its parents.

    folders: as of `list_missing`, before they were made. The caller must be the only writer.
    """
    try:
        yield
    except errors:
        if folders:
            shutil.rmtree(folders[0], ignore_errors=True)
        for parent in folders[1:]:
            with suppress(OSError):  # another process has begun to use it
                parent.rmdir()
        raise


@contextmanager
def atomic_folder(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield a temporary folder; on success rename it to `path`, replacing any old one; on an error remove it.

    check: called just before an old folder is replaced; it may raise an error.
    """
    with disk_errors(path):
        _require_folder(path)
        _make_folder(path.parent, path)
        temporary = _temporary(path)
        replaced = temporary.with_name(f"{temporary.name}.old")
        _make_folder(temporary, path)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    sync(file)
            sync(temporary)
            _require_folder(path)
            check()
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
            sync(path.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if replaced.exists() and not path.exists():
                os.replace(replaced, path)
            raise


def _require_folder(path: Path) -> None:
    """Raise DataError if there is anything but a folder in the place of one that will be written."""
    if os.path.lexists(path) and (kind := find_kind(path) or "a file") != "a folder":
        raise DataError(f"cannot write {path}: it is {kind}, not a folder; choose another place, or remove it")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); incv did not write it") from error


def read_parquet(path: Path, what: str, columns: list[str] | None = None) -> pa.Table:
    """Read a table, or only `columns` of it; `what` describes the table in the error message."""
    if kind := find_kind(path, follow=True):
        raise DataError(f"{path} is {kind}, not a {what}")
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a readable {what}: {error}") from error
