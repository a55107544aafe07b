"""Locks a folder while it is packed: by one process, or by several array tasks, each in only one process."""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shards.durable import disk_errors
from shards.errors import DataError, Fix
from shards.plan import ArrayTask
from shards.regular_file import open_regular

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_POLLS = 0.5
_MOST_REMOVED = 100
# errors of a file system without locks
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EINVAL, errno.ENOLCK)


@contextmanager
def lock_folder(out: Path, task: ArrayTask | None, while_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Lock the folder exclusively; for a task, take a shared lock on the folder and an exclusive one on the task.

    while_waiting: called again and again while another process holds the lock, and may raise; None: do not wait, but
    raise DataError. The kernel releases the locks when the process ends. They are on files opened for writing, not on
    the folder, because NFS supports no other locks between machines.
    """
    parts = out / ".parts"
    if task is None:
        with _locked(parts / "lock", fcntl.LOCK_EX, f"another process is packing into {out}", while_waiting):
            yield
        return
    alone = parts / f"task-{task.number}-of-{task.tasks}.lock"
    with (
        _locked(parts / "lock", fcntl.LOCK_SH, f"a process without --task is packing into {out}"),
        _locked(alone, fcntl.LOCK_EX, f"another process is running task {task} for {out}"),
    ):
        yield


@contextmanager
def _locked(path: Path, kind: int, why_not: str, while_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    descriptor = _acquire(path, kind, why_not, while_waiting)
    try:
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, kind: int, why_not: str, while_waiting: Callable[[], None] | None) -> int:
    """Return a file descriptor that holds the lock."""
    has_waited, removed = False, 0
    while True:
        descriptor = _open(path)
        is_locked = try_lock(descriptor, kind)
        # The last holder may have removed the file after this process had opened it. Where inode numbers change, it
        # would seem so every time.
        if is_locked and (_is_open_at(descriptor, path) or removed == _MOST_REMOVED):
            return descriptor
        os.close(descriptor)
        if is_locked:
            removed += 1
            continue
        if while_waiting is None:
            raise DataError(why_not, fix=["wait for it to finish", Fix("choose another {}", "out")])
        if not has_waited:
            _log.info("%s; waiting", why_not)
        has_waited = True
        while_waiting()
        time.sleep(_SECONDS_BETWEEN_POLLS)


def _open(path: Path) -> int:
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_regular(path, os.O_RDWR | os.O_CREAT)


def _is_open_at(descriptor: int, path: Path) -> bool:
    """Whether the file at `path` is still the one that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to take the lock without waiting; return whether that succeeded. Without locks, warn and return True."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("this file system has no locks (%s): do not start the same command twice", error.strerror)
    return True
