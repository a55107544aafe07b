"""Progress: a bar on a terminal, otherwise log lines."""

import logging
import sys
import time
from types import TracebackType

from tqdm import tqdm

_log = logging.getLogger(__name__)

_SECONDS_TO_FIRST_LINE = 10.0
_SECONDS_BETWEEN_LINES = 60.0


_bars_allowed = True


def allow_bars(allowed: bool) -> None:
    """Allow or forbid progress bars; ranks above 0 and runs that share a terminal forbid them."""
    global _bars_allowed
    _bars_allowed = allowed


class Progress:
    """Reports progress. Usage: `with Progress("pack", total) as progress: progress.advance(1)`."""

    def __init__(self, what: str, total: int, done: int = 0, unit: str = "images") -> None:
        self.what, self.total, self.done, self.unit = what, total, done, unit
        self._first = done
        self._note = ""
        self._terminal = _bars_allowed and sys.stderr.isatty()
        self._bar = (
            tqdm(total=total, initial=done, desc=what, unit=" " + unit, dynamic_ncols=True, leave=False)
            if self._terminal
            else None
        )
        self._facts: tqdm | None = None
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS_TO_FIRST_LINE

    def advance(self, count: int = 1, note: str = "") -> None:
        """Count `count` more units as done. note: text to show after the count, or below the bar, such as a loss."""
        self.done += count
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(count)
            if note:
                self._show(note)
        elif time.monotonic() >= self._next_line:
            self._line()

    def _show(self, note: str) -> None:
        """Show the note on a line of its own below the bar, cut to the terminal's width."""
        if self._facts is None:
            self._facts = tqdm(total=0, bar_format="  {desc}", dynamic_ncols=True, leave=False)
        self._facts.set_description_str(note)

    def _line(self) -> None:
        now = time.monotonic()
        rate = (self.done - self._first) / max(now - self._start, 1e-9)
        left = (self.total - self.done) / rate if rate > 0 else 0.0
        self._next_line = now + _SECONDS_BETWEEN_LINES
        line = f"{self.what}: {self.done:,}/{self.total:,} {self.unit}, {_short(rate)}/s, {left:,.0f} s left"
        _log.info("%s%s", line, f", {self._note}" if self._note else "")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in (self._facts, self._bar):
            if line is not None:
                line.close()


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
