"""The heartbeat file of a rank, which shows that it is alive and its current step; `incv doctor` reads them."""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from shards.errors import DataError
from shards.regular_file import require_regular
from trainer.distributed.launch import hostname

WAITING = "waiting"
"""Prefix of a position in which a rank waits for others, so that no progress is expected of it."""


class Heartbeat:
    """`update` sets the position in memory and is cheap; `write` writes the file.

    A rank that no longer writes its file is dead. A rank that writes it, but whose position never changes, hangs.
    """

    def __init__(self, path: Path | None, rank: int, size: int, launcher: str) -> None:
        """path: the heartbeat file; None to write none."""
        self._path = path
        self._identity = {"rank": rank, "size": size, "host": hostname(), "pid": os.getpid(), "launcher": launcher}
        self._position = ("start", 0, 0, time.time())
        self._ended: str | None = None
        self._write_lock = threading.Lock()  # keeps the watchdog thread from overwriting the last heartbeat

    def update(self, where: str, step: int, total: int) -> None:
        """Set the position: `step` of `total` in `where`, e.g. `incv/0/1`. An unchanged position means no progress.

        Call it before a step, once its batch has arrived, so that a rank whose loader hangs is one step behind the
        ranks that wait for it.
        """
        position = self._position
        if step != position[1] or where != position[0]:
            self._position = (where, step, total, time.time())  # one atomic assignment: another thread reads it

    def write(self) -> None:
        """Write the file atomically. A full or unavailable disk must not end the run."""
        if self._path is None:
            return
        with self._write_lock, suppress(OSError, DataError):
            where, step, total, moved = self._position
            position = {"where": where, "step": step, "total": total, "moved": round(moved, 3)}
            record = {**self._identity, **position, "written": round(time.time(), 3), "ended": self._ended}
            self._replace(self._path, (json.dumps(record) + "\n").encode())

    def close(self, how: str) -> None:
        """Write the last heartbeat. how: `finished`, `stopped` or `failed`."""
        self._ended = how
        self.write()

    def _replace(self, path: Path, content: bytes) -> None:
        """Replace the file atomically. No fsync: heartbeats need not survive a power failure."""
        # Unique to this process. If the process is killed, the next start removes the file (shards/durable.py).
        temporary = path.with_name(f".{path.name}.tmp{self._identity['pid']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        require_regular(path)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
