"""What a rank prints also goes to a file of its own; rank 0 alone is heard on the terminal."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

from shards.durable import disk_errors
from shards.errors import InputError
from trainer.distributed.launch import hostname


@contextmanager
def rank_log(path: Path, rank: int, size: int) -> Iterator[None]:
    """Until the end of the block, stdout and stderr of Python go to `path` too, or there alone for ranks above 0.

    An error that leaves the block is written to the file; telling the terminal is the work of who catches it.
    """
    file = _LogFile(path)
    file.line(
        f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {hostname()} pid {os.getpid()}, rank {rank} of {size}"
    )
    before = sys.stdout, sys.stderr
    streams = [_LoggedStream(stream, file, echo=rank == 0) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield
    except InputError as error:
        file.line(f"incv: error: {error}")
        raise
    except Exception:
        file.line(traceback.format_exc().rstrip())
        raise
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.end()
        file.close()


def print_from_any_rank(line: str) -> None:
    """Print a line to the terminal from any rank, and to the rank's file where it has one."""
    stream = sys.stderr
    if isinstance(stream, _LoggedStream):
        stream.print_from_any_rank(line)
    else:
        print(line, file=stream, flush=True)


class _LogFile:
    """Whole lines, appended at once. A disk that is full must not end the run, so lost lines are lost."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def line(self, text: str) -> None:
        if text:
            with suppress(OSError):
                os.write(self._descriptor, f"{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


class _LoggedStream:
    """A text stream that copies its whole lines to a file; asked anything else, it answers for the stream below.

    Progress bars are for the terminal: what begins with a carriage return or a cursor movement is not copied.
    """

    def __init__(self, below: TextIO, file: _LogFile, echo: bool) -> None:
        self._below, self._file, self._echo = below, file, echo
        self._line = ""
        self._open = True
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        if self._echo or not self._open:
            self._below.write(text)
        if self._open and not text.startswith(("\r", "\x1b")):
            with self._lock:
                *whole, self._line = (self._line + text).split("\n")
                for line in whole:
                    self._file.line(_as_seen(line))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._echo or not self._open:
            self._below.flush()

    def isatty(self) -> bool:
        return self._echo and self._below.isatty()

    def print_from_any_rank(self, line: str) -> None:
        self._file.line(line)
        print(line, file=self._below, flush=True)

    def end(self) -> None:
        """From now on only the stream below: a handler of `logging` may hold this one for longer than the block."""
        with self._lock:
            self._open = False
            self._file.line(_as_seen(self._line))
            self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def _as_seen(line: str) -> str:
    """What a terminal shows of it in the end: what follows the last carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]
