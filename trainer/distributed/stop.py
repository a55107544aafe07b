"""A wish to stop, by signal, by a file named STOP or by another rank; loops poll it, the handler only notes it."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from weakref import WeakSet

from trainer.distributed.launch import get_launch_time
from trainer.distributed.watchdog import Watchdog

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_ROUNDING = 1.0  # second; the time at which a process began is not known better
_LOOKS, _SECONDS_BETWEEN_LOOKS = 50, 0.1
EXIT_STOPPED = 75  # EX_TEMPFAIL: run the same command again to go on


class Stopped(Exception):
    """Raised by a loop once its progress is durable."""

    def __init__(self, where: str, step: int, reason: str) -> None:
        super().__init__(f"stopped in {where} at step {step} ({reason})")
        self.where, self.step, self.reason = where, step, reason


class StopRequest:
    def __init__(self, run_dir: Path | None = None) -> None:
        self._file = run_dir / "STOP" if run_dir is not None else None
        self._signal: str | None = None
        self._pulse: Watchdog | None = None
        self._looked = False
        self._old: tuple[int, int] | None = None

    def listen(self) -> None:
        """Take over the signals; whoever listened before still hears them."""
        _LISTENING.add(self)
        for number in _SIGNALS:
            signal.signal(number, _on_signal)

    def join(self, watchdog: Watchdog) -> None:
        """From now on the other ranks are asked too: their wish is ours, and ours theirs."""
        self._pulse = watchdog

    def note_signal(self, name: str) -> None:
        self._signal = name

    def remove_stale_file(self) -> None:
        """Remove a STOP file that is no longer meant; call it once the directory is ours."""
        if self._file is not None and self._file.exists() and not self._file_is_meant():
            print(f"warning: {self._file} is from before this start and was removed", file=sys.stderr)
            self._file.unlink()

    def local_reason(self) -> str | None:
        """Why this process was asked to stop, or None."""
        if self._signal is not None:
            return self._signal
        return "STOP file" if self._file_is_meant() else None

    def _file_is_meant(self) -> bool:
        """Not one that lay there at the first look, from before the launcher's start.

        Only that one is judged by its time: clocks of file servers and machines differ. Agents restart workers, so a
        file that one of them has not obeyed before it died is younger than the launcher, and meant.
        """
        if self._file is None:
            return False
        try:
            found = self._file.stat()
        except OSError:  # none, or a network file system that fails for a while
            self._looked = True
            return False
        mark = (found.st_ino, found.st_mtime_ns)
        if not self._looked:
            self._looked = True
            self._old = mark if found.st_mtime < get_launch_time() - _ROUNDING else None
        return mark != self._old

    def local_signal(self) -> str | None:
        """The same for a rank that leaves looking for the file to rank 0: not all of them must ask the disk."""
        return self._signal

    def reason(self) -> str | None:
        """Why to stop, or None; raises where another rank cannot go on."""
        if self._pulse is None:
            return self.local_reason()
        self._pulse.raise_if_failed()
        return self._signal or self._pulse.stop_reason

    def requested(self) -> bool:
        return self.reason() is not None

    def wait_for_reason(self) -> str:
        """The reason of a stop that the ranks have agreed on; another rank's may be on its way."""
        for _ in range(_LOOKS):
            if reason := self.reason():
                return reason
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return "another rank was asked to stop"

    def mark_obeyed(self) -> None:
        """After the stop is recorded: the STOP file has been obeyed."""
        if self._file is not None and self._file.exists():
            self._file.rename(self._file.with_name("STOP.obeyed"))


_LISTENING: "WeakSet[StopRequest]" = WeakSet()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for request in _LISTENING:
        request.note_signal(signal.Signals(number).name)
