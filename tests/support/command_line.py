"""Run the `incv` command in this process and capture its exit code and output."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support import RECIPES, REPOSITORY
from tests.support.untimed import untimed
from trainer.cli import main

TINY = str(RECIPES / "tiny.yaml")
THREADS = "execution.threads=1"  # an execution key; bitwise comparisons need it fixed


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def exit_code(arguments: Sequence[str]) -> int:
    """Run the command; undo what it does to its process. An exception that escapes is a traceback for the user."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    threads = torch.get_num_threads()
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as ended:  # argparse
        return int(ended.code or 0)
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def variant_roots(out: str, key: str) -> list[Path]:
    """The run directories of the variants of `--vary KEY=...`, from what the command prints at its end."""
    return [Path(line.split()[1].rstrip(",")) for line in out.splitlines() if line.startswith(f"{key}=")]


def stop_during_incv(*arguments: str) -> str:
    """Run the command in a process, stop it by SIGTERM as soon as INCV trains, and return its stderr."""
    command = [sys.executable, "-m", "trainer", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ, text=True)
    limit = time.monotonic() + 120
    while not list(Path().glob("runs/*/rounds/0/fold*/metrics.jsonl")) and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    return error


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path under `folder` and, of files, every byte but the times of metrics.jsonl; links are not followed."""
    return dict(_contents(folder, folder))


def _contents(folder: Path, root: Path) -> Iterator[tuple[str, bytes | None]]:
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        yield str(path.relative_to(root)), untimed(path) if path.is_file() else None
        if is_folder:
            yield from _contents(path, root)


def times(folder: Path) -> dict[str, int]:
    """When each file under `folder` was last written."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Nothing under `folder` may be written, made or removed."""
    before = contents(folder)
    yield
    after = contents(folder)
    assert after.keys() == before.keys()
    assert after == before
