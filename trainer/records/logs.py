"""Log output: rank 0 writes to the terminal, and every rank writes to its own file.

Modules log through `logging.getLogger(__name__)`. `configure_logging` installs one handler, which writes to the
current `LogTarget`. A run sets its own target while it is active, because several runs may share a process.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from shards.durable import disk_errors
from shards.errors import CommandStopped, InputError
from shards.progress import allow_bars
from shards.regular_file import open_regular
from trainer.distributed.launch import hostname
from trainer.distributed.stop import EXIT_STOPPED

ANY_RANK = {"any_rank": True}
"""Pass as `extra` to print a log line on the terminal from any rank, not only from rank 0."""

_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "incv: error: "}
_PACKAGES = ("trainer", "shards")
_log = logging.getLogger(__name__)


class LogFile:
    """A log file, appended to line by line. Write errors are ignored: a full disk must not end the run."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._descriptor, f"{text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


@dataclass(frozen=True)
class LogTarget:
    """Where log lines go."""

    prefix: str = ""
    """Prefix of every terminal line; it names the run if several share a process."""
    file: LogFile | None = None
    echo: bool = True
    """Whether to print all lines on the terminal; if false, as on ranks above 0, only those marked ANY_RANK."""


_target = LogTarget()


def current_target() -> LogTarget:
    return _target


def set_target(target: LogTarget) -> None:
    global _target
    _target = target
    allow_bars(target.echo and not target.prefix)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        target = _target
        try:
            text = _PREFIXES.get(record.levelno, "") + record.getMessage()
            if record.exc_info:
                text += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if target.file is not None:
                target.file.write(f"{_now()} {record.levelname:<7} {text}")
            if target.echo or getattr(record, "any_rank", False):
                # tqdm.write does not break an active progress bar.
                tqdm.write(target.prefix + text, file=sys.stderr)
        except Exception:
            self.handleError(record)


def configure_logging() -> None:
    """Send the log lines of `trainer` and `shards` to the current target. Repeated calls have no effect."""
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if not any(isinstance(handler, _Handler) for handler in logger.handlers):
            logger.addHandler(_Handler())


@contextmanager
def show_progress(shown: bool) -> Iterator[None]:
    """Within the block, print log lines and bars as a command does, or nothing; logging is then as it was before."""
    loggers = [logging.getLogger(name) for name in _PACKAGES]
    before = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    target = _target
    configure_logging()
    set_target(replace(target, echo=target.echo and shown))
    try:
        yield
    finally:
        set_target(target)
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate, logger.handlers = propagate, handlers


@contextmanager
def log_to_file(path: Path, rank: int, size: int) -> Iterator[None]:
    """Within the block, also log to the file `path`, and print on the terminal only on rank 0.

    An exception that leaves the block is written to the file; the caller reports it on the terminal.
    """
    file = LogFile(path)
    file.write(f"--- {_now()} {hostname()} pid {os.getpid()}, rank {rank} of {size}")
    before = _target
    set_target(replace(before, file=file, echo=before.echo and rank == 0))
    try:
        yield
    except InputError as error:
        file.write(f"{_now()} ERROR   {_PREFIXES[logging.ERROR]}{error}")
        raise
    except Exception:
        file.write(f"{_now()} ERROR   {traceback.format_exc().rstrip()}")
        raise
    finally:
        set_target(before)
        file.close()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def report_error(error: CommandStopped | InputError) -> int:
    """Log the error that ends a command as one line; returns its exit code."""
    if isinstance(error, CommandStopped):
        _log.info("incv: %s", error)
        return EXIT_STOPPED
    _log.error("%s", error)
    return error.exit_code
