"""Stop requests from a signal, a STOP file or another rank. The signal handler only sets a flag, which loops poll."""

import logging
import signal
import time
from pathlib import Path
from types import FrameType
from weakref import WeakSet

from trainer.distributed.launch import get_launch_time
from trainer.distributed.place import show_place
from trainer.distributed.watchdog import Watchdog

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_START_TIME_RESOLUTION = 1.0  # seconds
_POLLS, _POLL_SECONDS = 50, 0.1
EXIT_STOPPED = 75  # EX_TEMPFAIL: rerun the same command to resume


class Stopped(Exception):
    """Raised by a loop that received a stop request, once its progress is durable."""

    def __init__(self, where: str, step: int, reason: str, title: str | None = None) -> None:
        """title: what progress lines call `where`, if it has another name there."""
        super().__init__(f"stopped in {title or show_place(where)} at step {step} ({reason})")
        self.where, self.step, self.reason = where, step, reason


class StopRequest:
    """Whether and why this run should stop: this process's own signal or STOP file, or another rank's."""

    def __init__(self, run_dir: Path | None = None) -> None:
        self._file = run_dir / "STOP" if run_dir is not None else None
        self._signal: str | None = None
        self._watchdog: Watchdog | None = None
        self._checked = False
        self._stale: tuple[int, int] | None = None

    def listen(self) -> None:
        """Install the signal handlers; earlier StopRequests continue to receive signals too."""
        _LISTENING.add(self)
        for number in _SIGNALS:
            signal.signal(number, _on_signal)

    def attach(self, watchdog: Watchdog) -> None:
        """Attach the watchdog, which makes `reason` cover the stop requests of all ranks."""
        self._watchdog = watchdog

    def record_signal(self, name: str) -> None:
        self._signal = name

    def remove_stale_file(self) -> None:
        """Remove a STOP file that predates this launch; call it while holding the directory's lock."""
        if self._file is not None and self._file.exists() and not self._file_is_current():
            _log.warning("removed %s, which is older than this start of the run", self._file)
            self._file.unlink()

    def local_reason(self) -> str | None:
        """Return this process's own reason to stop (signal or STOP file), or None."""
        if self._signal is not None:
            return self._signal
        return "STOP file" if self._file_is_current() else None

    def _file_is_current(self) -> bool:
        """Whether there is a STOP file that does not predate the launcher.

        The mtime is compared only in the first check, since the clocks of file server and node may differ. A file
        that appears later is always current. A STOP file that a killed worker did not obey is newer than the
        launcher, so the restarted worker obeys it.
        """
        if self._file is None:
            return False
        try:
            found = self._file.stat()
        except OSError:  # no file, or a transient error of a network file system
            self._checked = True
            return False
        identity = (found.st_ino, found.st_mtime_ns)
        if not self._checked:
            self._checked = True
            self._stale = identity if found.st_mtime < get_launch_time() - _START_TIME_RESOLUTION else None
        return identity != self._stale

    def local_signal(self) -> str | None:
        """Return the signal this process received, or None; unlike `local_reason`, does not access the disk."""
        return self._signal

    def reason(self) -> str | None:
        """Return why the run should stop, or None; raise WorldError if another rank has failed."""
        if self._watchdog is None:
            return self.local_reason()
        self._watchdog.raise_if_failed()
        return self._signal or self._watchdog.stop_reason

    def requested(self) -> bool:
        return self.reason() is not None

    def wait_for_reason(self) -> str:
        """Return the reason for a stop the ranks have agreed on; waits briefly, as another rank's may arrive late."""
        for _ in range(_POLLS):
            if reason := self.reason():
                return reason
            time.sleep(_POLL_SECONDS)
        return "another rank received a stop request"

    def mark_obeyed(self) -> None:
        """Rename the STOP file to STOP.obeyed; call this after the stop is recorded."""
        if self._file is not None and self._file.exists():
            self._file.rename(self._file.with_name("STOP.obeyed"))


_LISTENING: "WeakSet[StopRequest]" = WeakSet()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for request in _LISTENING:
        request.record_signal(signal.Signals(number).name)
