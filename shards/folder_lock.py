"""Locks of a folder that is being packed: one packer, or several array tasks, each at most once."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.durable import disk_errors
from shards.errors import DataError
from shards.plan import ArrayTask

# a file system without locks: the user has to start one packer only
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)


@contextmanager
def lock_folder(out: Path, task: ArrayTask | None) -> Iterator[None]:
    """Hold the lock of the folder, or share it and hold that of the task; the kernel releases both with the process.

    The locks are on files opened for writing, not on the folder: NFS supports no others between machines.
    """
    parts = out / ".parts"
    with disk_errors(parts):
        parts.mkdir(parents=True, exist_ok=True)
    if task is None:
        with _locked(parts / "lock", fcntl.LOCK_EX, f"another process is packing into {out}"):
            yield
        return
    alone = parts / f"task-{task.number}-of-{task.tasks}.lock"
    with (
        _locked(parts / "lock", fcntl.LOCK_SH, f"a process without --task is packing into {out}"),
        _locked(alone, fcntl.LOCK_EX, f"another process is doing task {task} of {out}"),
    ):
        yield


@contextmanager
def _locked(path: Path, kind: int, why_not: str) -> Iterator[None]:
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(descriptor, kind):
            raise DataError(f"{why_not}; wait for it, or choose another --out")
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock without waiting; return whether it succeeded, always True without lock support."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
