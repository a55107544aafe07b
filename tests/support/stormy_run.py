"""`torchrun ... stormy_run.py PLAN -- run -c ...`: an `incv` command, disturbed at the moments in PLAN.

The product has no test hooks; this wraps the one function that every loop tells where it stands. A rank that comes
to its moment says so in a file. SIGKILL it then sends itself, some milliseconds later, whatever it is doing by then;
for everything else it waits until the test has sent it, and goes on.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.storm_moments import Moment
from trainer.cli import main
from trainer.records.heartbeat import Heartbeat

_PAUSE = 0.02
"""Seconds before each step or batch: phases last long enough to be hit."""
_PAUSE_ONCE_ASKED = 0.2
"""The same after a wish was sent: a file is looked for four times a second."""
_SECONDS_TO_BE_SENT = 30.0


class Disturbed:
    """One rank's moments, and where it is."""

    def __init__(self, folder: Path, moments: list[Moment], rank: int) -> None:
        self._folder, self._moments, self._rank = folder, moments, rank
        self._met: Counter[tuple[str, int]] = Counter()
        self._place: tuple[str, int] = ("", -1)
        self._pause = _PAUSE

    def at(self, where: str, step: int) -> None:
        if (where, step) == self._place:
            return
        self._place = (where, step)
        self._met[self._place] += 1
        self._write(f"place-rank{self._rank}", {})
        time.sleep(self._seconds())
        for moment in self._moments:
            if self._has_come(moment):
                self._disturb(moment)

    def _seconds(self) -> float:
        """A moment may want one training slow, until it has come or, if that is all it does, to its end."""
        for moment in self._moments:
            held_back = moment.kind == "none" or not self._announcement(moment).exists()
            if moment.slow == self._place[0] and held_back:
                return moment.slow_seconds
        return self._pause

    def _has_come(self, moment: Moment) -> bool:
        return (
            (moment.where, moment.number, moment.rank) == (*self._place, self._rank)
            and self._met[self._place] == moment.occurrence
            and not self._announcement(moment).exists()
        )

    def _announcement(self, moment: Moment) -> Path:
        return self._folder / f"{moment.name}.json"

    def _disturb(self, moment: Moment) -> None:
        self._write(moment.name, {"pid": os.getpid(), "agent": os.getppid()})
        if moment.kind == "SIGKILL":
            threading.Timer(moment.delay, self._die, [moment]).start()
        elif moment.kind != "none":
            self._pause = _PAUSE_ONCE_ASKED
            limit = time.monotonic() + _SECONDS_TO_BE_SENT
            while not (self._folder / f"{moment.name}.sent").exists():
                assert time.monotonic() < limit, f"nobody sent {moment.kind}"
                time.sleep(0.002)

    def _die(self, moment: Moment) -> None:
        """No handler, no `finally`, no flush: what a kill -9 from outside does."""
        self._write(f"{moment.name}.died", {})
        os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, name: str, more: dict[str, Any]) -> None:
        where, number = self._place
        record = {"where": where, "number": number, "rank": self._rank, "time": time.time(), **more}
        temporary = self._folder / f"{name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(record))
        temporary.rename(self._folder / f"{name}.json")


def disturb(plan: Path) -> None:
    content = json.loads(plan.read_text())
    moments = [Moment(**each) for each in content["moments"]]
    disturbed = Disturbed(plan.parent, moments, int(os.environ["RANK"]))
    update = Heartbeat.update

    def disturbed_update(self: Heartbeat, where: str, step: int, total: int) -> None:
        update(self, where, step, total)
        disturbed.at(where, step)

    Heartbeat.update = disturbed_update  # type: ignore[method-assign]


if __name__ == "__main__":
    plan, separator, *arguments = sys.argv[1:]
    assert separator == "--", __doc__
    disturb(Path(plan))
    sys.exit(main(arguments))
