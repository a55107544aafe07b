"""Locks a folder while it is packed: by one process, or by several array tasks, each in only one process."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.durable import disk_errors
from shards.errors import DataError
from shards.plan import ArrayTask

# errors of a file system without locks: the user must not start two packers
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)


@contextmanager
def lock_folder(out: Path, task: ArrayTask | None) -> Iterator[None]:
    """Lock the folder exclusively; for a task, take a shared lock on the folder and an exclusive one on the task.

    The kernel releases the locks when the process ends. They are on files opened for writing, not on the folder,
    because NFS supports no other locks between machines.
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
        _locked(alone, fcntl.LOCK_EX, f"another process is running task {task} for {out}"),
    ):
        yield


@contextmanager
def _locked(path: Path, kind: int, why_not: str) -> Iterator[None]:
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(descriptor, kind):
            raise DataError(f"{why_not}; wait for it to finish, or choose another --out")
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to take the lock without waiting; return whether that succeeded. True if locks are not supported."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
