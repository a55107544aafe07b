"""A small file in which a rank says that it lives and where it stands; `incv doctor` reads those of all ranks."""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from trainer.distributed.launch import hostname

WAITING = "waiting"
"""A place that begins with this word is one where standing still is right: others are at work."""


class Heartbeat:
    """`at` says where this rank is, as often as one likes; `beat` writes it down.

    A rank whose file is no longer written is dead. One whose file is written and whose place never changes hangs.
    """

    def __init__(self, path: Path | None, rank: int, size: int, launcher: str) -> None:
        """path: None for no file at all."""
        self._path = path
        self._who = {"rank": rank, "size": size, "host": hostname(), "pid": os.getpid(), "launcher": launcher}
        self._place = ("start", 0, 0, time.time())
        self._ended: str | None = None
        self._writing = threading.Lock()  # the last beat must not be overtaken by one of the beating thread

    def update(self, where: str, step: int, total: int) -> None:
        """This rank is at `step` of `total` in `where` (`incv/0/1`); the same place again is no movement.

        Call it once the batch of a step is there, before the step: a rank whose reading hangs is then one step
        behind those that wait for it.
        """
        place = self._place
        if step != place[1] or where != place[0]:
            self._place = (where, step, total, time.time())  # one assignment: another thread reads it

    def write(self) -> None:
        """Write the file, whole. A disk that is full or gone must not end the run, so nothing is raised."""
        if self._path is None:
            return
        with self._writing, suppress(OSError):
            where, step, total, moved = self._place
            place = {"where": where, "step": step, "total": total, "moved": round(moved, 3)}
            record = {**self._who, **place, "written": round(time.time(), 3), "ended": self._ended}
            self._replace(self._path, (json.dumps(record) + "\n").encode())

    def close(self, how: str) -> None:
        """The last beat: `finished`, `stopped` or `failed`."""
        self._ended = how
        self.write()

    def _replace(self, path: Path, content: bytes) -> None:
        """Readers see the old file or the new one. No fsync: after a power cut nobody asks who lives."""
        # A name that a start sweeps away where a kill left it behind (shards/durable.py), of this process alone.
        temporary = path.with_name(f".{path.name}.tmp{self._who['pid']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
