"""Runs of recipes/tiny.yaml as real processes, and the files they leave."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import torch

from shards.pack import pack
from shards.sources import open_source
from tests.support import RECIPES
from tests.support.untimed import untimed
from trainer.cli import main
from trainer.incv.selection_index import SelectionIndex
from trainer.training.checkpoint import read_checkpoint

RECIPE = RECIPES / "tiny.yaml"
DRIVER = Path(__file__).with_name("killed_run.py")
CHECKPOINT_EVERY = 5
# One thread: a CPU's results are bit-identical for the same number of threads. A small predict batch, so that
# a pass over half of 300 samples has several.
EXECUTION = ("execution.threads=1", "execution.predict_batch=64", f"execution.checkpoint_every={CHECKPOINT_EVERY}")


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on; all are held until all are found."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def pack_digits(folder: Path) -> Path:
    """The same folder, in which recipes/tiny.yaml now finds its shards."""
    for split in ("train", "test"):
        pack(open_source("digits", None, split), folder / "data" / "shards" / f"digits-{split}")
    return folder


def command(run_dir: Path) -> list[str]:
    return ["run", "-c", str(RECIPE), "--run-dir", str(run_dir), *EXECUTION]


def start(cwd: Path, run_dir: Path, log: Path, killed_at: str | None = None) -> "subprocess.Popen[bytes]":
    """`incv run` in a process of its own; its output goes to `log`."""
    program = ["-m", "trainer"] if killed_at is None else [str(DRIVER), killed_at, "--"]
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *program, *command(run_dir)], cwd=cwd, stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: "subprocess.Popen[bytes]", seconds: float = 180) -> int:
    """Its exit code; a process that hangs is killed and is a failure."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    """Poll until `condition` holds; it must come true while the process runs."""
    limit = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before the awaited moment"
        assert time.monotonic() < limit, "the awaited moment did not come"
        time.sleep(0.005)


def run_here(arguments: list[str]) -> tuple[int, str]:
    """Exit code and stderr of `incv` inside this process (which has imported torch already)."""
    error = io.StringIO()
    with own_process_state(), contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    return code, error.getvalue()


@contextlib.contextmanager
def own_process_state() -> Iterator[None]:
    """Undo what the command does to its process: signal handlers, torch's threads."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    threads, folder = torch.get_num_threads(), Path.cwd()
    try:
        yield
    finally:
        os.chdir(folder)
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def trainings(run_dir: Path) -> dict[str, Path]:
    """Name (as in manifest.json and stopped.json) and folder of every training begun in a run."""
    folders = sorted((run_dir / "rounds").glob("*/fold*")) + sorted((run_dir / "methods").glob("*"))
    return {training_name(run_dir, folder): folder for folder in folders}


def training_name(run_dir: Path, folder: Path) -> str:
    kind, *rest = folder.relative_to(run_dir).parts
    return f"incv/{rest[0]}/{rest[1].removeprefix('fold')}" if kind == "rounds" else rest[0]


def step_folders(training: Path) -> list[Path]:
    """Its checkpoints, oldest first."""
    return sorted((training / "checkpoints").glob("step-*"))


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def newest_durable_step(training: Path) -> int:
    folder = step_folders(training)[-1]
    read_checkpoint(folder)  # whole, or this raises
    return step_of(folder)


def temporary_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".*.tmp*"))


def require_whole(run_dir: Path) -> None:
    """Every checkpoint and every table that is there can be read."""
    for folder in run_dir.rglob("step-*"):
        read_checkpoint(folder)
    for file in run_dir.rglob("*.parquet"):
        pq.read_table(file)
    assert temporary_files(run_dir) == []


def require_same_results(run_dir: Path, other: Path) -> None:
    """The same selection, and bitwise the same final weights, predictions, metrics, list of labels and accuracy."""
    checksums = [SelectionIndex.read(each / "selection.parquet").checksum() for each in (run_dir, other)]
    assert checksums[0] == checksums[1]
    ours, theirs = trainings(run_dir), trainings(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        last = [step_folders(each[name])[-1] for each in (ours, theirs)]
        assert last[0].name == last[1].name, name
        for file in ("tensors.safetensors", "state.json"):
            assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), f"{name}: {file}"
    exported = sorted(file.relative_to(other) for file in other.glob("methods/*/export/*/model.safetensors"))
    assert len(exported) == 5
    tables = sorted(file.relative_to(other) for file in other.glob("rounds/**/predictions.parquet"))
    metrics = sorted(file.relative_to(other) for file in other.rglob("metrics.jsonl"))
    lists = [Path("labels_review.csv"), Path("labels_review.parquet")]
    for file in [*exported, *tables, *metrics, *lists, Path("evaluation.json")]:
        assert untimed(run_dir / file) == untimed(other / file), file
