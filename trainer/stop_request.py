"""A wish to stop, by signal or by a file named STOP; loops poll it, nothing happens in the handler."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
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
        self._began = time.time()

    def listen(self) -> None:
        """Take over the signals."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name

    def forget_old_file(self) -> None:
        """A STOP file from before this start is no longer meant; call it once the directory is ours."""
        if self._file is not None and self._file.exists() and self._file.stat().st_mtime < self._began:
            print(f"warning: {self._file} is from before this start and was removed", file=sys.stderr)
            self._file.unlink()

    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self._signal is not None:
            return self._signal
        return "STOP file" if self._file is not None and self._file.exists() else None

    def requested(self) -> bool:
        return self.reason() is not None

    def settle(self) -> None:
        """After the stop is recorded: the STOP file has been obeyed."""
        if self._file is not None and self._file.exists():
            self._file.rename(self._file.with_name("STOP.obeyed"))
