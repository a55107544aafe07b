"""Two-rank runs of recipes/tiny.yaml under torchrun, signals to them, and leftover processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shards.durable import read_json
from tests.support import REPOSITORY, processes
from tests.support.storm_moments import Moment

DRIVER = Path(__file__).with_name("stormy_run.py")
LOST_AFTER = 6
# A small predict batch, so that a pass has several on each rank.
EXECUTION = (
    "execution.threads=1",
    "execution.world=2",
    "execution.predict_batch=8",
    f"execution.checkpoint_every={processes.CHECKPOINT_EVERY}",
    f"execution.lost_after={LOST_AFTER}",
)
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
ONE_NODE = ("--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=5", SIGNALS)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    ours = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return os.environ | ours | (more or {})


def command(run_dir: Path, launcher: Sequence[str], plan: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """torchrun, and by it `incv run`; with a plan the disturbed one."""
    program = ["-m", "trainer"] if plan is None else [str(DRIVER), str(plan), "--"]
    recipe = ["-c", str(processes.RECIPE), "--run-dir", str(run_dir)]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *launcher),
        *(*program, "run", *recipe, *EXECUTION, *overrides),
    ]


def start(
    arguments: list[str], cwd: Path, log: Path, more: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """In a session of its own, its output added to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            arguments,
            cwd=cwd,
            env=environment(more),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def of_run(run_dir: Path) -> dict[int, str]:
    """Processes whose command line names the run directory: launchers, ranks and whatever these have forked."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if str(run_dir).encode() in words:
                found[int(folder.name)] = b" ".join(words).decode()
    return found


def working_in(folder: Path) -> dict[int, str]:
    """Processes whose working directory is the folder that runs are started in: helpers of torch's too."""
    found = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # it has just ended
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder):
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def require_no_orphans(run_dir: Path, seconds: float = 2.0) -> None:
    """After a launcher's end; the kernel may need a moment to take a process away."""
    limit = time.monotonic() + seconds
    while (left := of_run(run_dir) | working_in(run_dir.parent)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def end_all(run_dir: Path) -> None:
    """After a failure: nothing that a test has started outlives it."""
    for process in of_run(run_dir):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


class Weather:
    """The moments of one run: which have come, and the sending of what is asked for."""

    def __init__(self, folder: Path, moments: Sequence[Moment], run_dir: Path) -> None:
        folder.mkdir(parents=True)
        self.plan = folder / "plan.json"
        self.plan.write_text(json.dumps({"moments": [vars(moment) for moment in moments]}))
        self._folder, self._moments, self._run_dir = folder, moments, run_dir
        self.places: dict[str, dict[int, str]] = {}
        """Of every moment that has come: where each rank was."""

    def record(self, moment: Moment, kind: str = "") -> dict[str, Any] | None:
        """What the rank said when the moment came, or, kind `.died`, last."""
        file = self._folder / f"{moment.name}{kind}.json"
        return read_json(file) if file.exists() else None

    def look(self) -> list[Moment]:
        """Answer the moments that have come since the last look; returns them."""
        come = []
        for moment in self._moments:
            record = None if moment.name in self.places else self.record(moment)
            if record is not None:
                self.places[moment.name] = self.where_all_are()
                self._send(moment, record)
                come.append(moment)
        return come

    def where_all_are(self) -> dict[int, str]:
        """By rank: loop and step."""
        records = [read_json(file) for file in sorted(self._folder.glob("place-rank*.json"))]
        return {each["rank"]: f"{each['where']} {each['number']}" for each in records}

    def _send(self, moment: Moment, record: dict[str, Any]) -> None:
        if moment.kind == "STOP file":
            (self._run_dir / "STOP").touch()
        elif moment.kind not in ("SIGKILL", "none"):
            name, _, to_agent = moment.kind.partition(" ")
            os.kill(record["agent" if to_agent else "pid"], signal.Signals[name])
        (self._folder / f"{moment.name}.sent").touch()


def until_end(
    process: "subprocess.Popen[bytes]", look: Callable[[], object], log: Path, run_dir: Path, seconds: float = 120
) -> int:
    """The launcher's exit code; `look` is called all the while. A hang is a failure, told with the last lines."""
    limit = time.monotonic() + seconds
    while process.poll() is None:
        look()
        if time.monotonic() > limit:
            beats = {file.name: file.read_text() for file in (run_dir / "logs").glob("heartbeat-*")}
            raise AssertionError(f"no end after {seconds} s; {beats}\n{tail(log)}")
        time.sleep(0.005)
    look()
    return process.returncode
