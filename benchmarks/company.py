"""Other load on the machine: wait until it is idle, and record the load during a measurement."""

import os
import resource
import sys
import time
from pathlib import Path

_LOOK = 2.0
_QUIET = 0.1
_IDLE_COLUMNS = (3, 4)  # idle and waiting for a disk, of the first line of /proc/stat


def wait_for_quiet(seconds: float) -> float:
    """Return once others have left the cores alone for two seconds, or after `seconds`; the share they last took."""
    limit = time.monotonic() + seconds
    said = False
    while True:
        others = Others()
        time.sleep(_LOOK)
        share = others.share()
        if share < _QUIET or time.monotonic() > limit:
            return share
        if not said:
            print(f"waiting up to {seconds:.0f} s for a quiet machine", file=sys.stderr)
            said = True


class Others:
    """What everybody but this process and its children takes of all cores, from now on."""

    def __init__(self) -> None:
        self._began, self._machine, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """0 to 1. Children count as others until they were waited for."""
        taken = (_busy_seconds() - self._machine) - (_own_seconds() - self._own)
        cores = os.cpu_count() or 1  # /proc/stat knows no affinity
        return max(0.0, taken / (cores * (time.monotonic() - self._began)))


def said_of(shares: list[float]) -> str:
    """For the note of a record."""
    return f"other processes took {min(shares):.0%} to {max(shares):.0%} of the cores during a run"


def _busy_seconds() -> float:
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = sum(count for column, count in enumerate(ticks) if column not in _IDLE_COLUMNS)
    return busy / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
