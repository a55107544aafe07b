"""Who may write into a folder that is being packed: one packer, or several tasks of an array, each once."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.durable import disk_errors
from shards.errors import DataError
from shards.plan import ArrayTask

# a file system without locks, where the user has to take care
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)


@contextmanager
def sole_writer(out: Path, task: ArrayTask | None) -> Iterator[None]:
    """Locks end with the process, however that ends. Tasks share the folder; each has a lock of its own.

    They are on files opened for writing, not on the folder itself: NFS knows no other locks between machines.
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
        if not lock_now(descriptor, kind):
            raise DataError(f"{why_not}; wait for it, or choose another --out")
        yield
    finally:
        os.close(descriptor)


def lock_now(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Whether the lock was to be had at once; always, on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
