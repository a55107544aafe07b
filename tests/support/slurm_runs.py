"""Runs of recipes/tiny.yaml submitted to Slurm as a user would, and the processes they start."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.durable import read_json
from tests.support import RECIPES, REPOSITORY
from tests.support.slurm_cluster import Job, SlurmCluster, wait_until

SCRIPT = REPOSITORY / "slurm" / "incv_webvision.sh"
RECIPE = ("-c", str(RECIPES / "tiny.yaml"))
# One thread: results are bit-identical for the same number of threads. A rank may be held still for minutes.
EXECUTION = ("execution.threads=1", "execution.predict_batch=64", "execution.checkpoint_every=5")
PATIENCE = ("execution.lost_after=300", "execution.timeout=600")


@dataclass(frozen=True)
class Runs:
    cluster: SlurmCluster
    folder: Path

    def submit(self, name: str, *arguments: str, nodes: int = 2, gpus: int = 0, **variables: str) -> str:
        """The same line for the same arguments; `name` is the run directory. Returns the number of the job."""
        variables.setdefault("INCV_SETUP", str(self.folder / "setup.sh"))
        options = [f"--nodes={nodes}", "--time=20", "--output=job-%j.log"]
        if gpus:
            options.append(f"--gpus-per-node={gpus}")
        line = self.arguments(name, *arguments)
        return self.cluster.submit(SCRIPT, *line, cwd=self.folder, options=options, **variables)

    def arguments(self, name: str, *others: str) -> list[str]:
        return [*others, *RECIPE, *EXECUTION, *PATIENCE, "--run-dir", name]

    def log(self, job: str) -> str:
        log = self.folder / f"job-{job}.log"
        return log.read_text() if log.exists() else ""

    def wait_for_end(self, job: str, seconds: float = 180) -> Job:
        return self.cluster.wait_for_end(job, seconds, lambda: self.log(job))

    def wait_until(self, job: str, condition: Callable[[], bool], seconds: float = 120) -> None:
        wait_until(condition, seconds, lambda: f"{self.cluster.job(job)}\n{self.log(job)}")

    def wait_for_training(self, job: str, training: str) -> None:
        """Until it has logged its first step; `run/rounds/0/fold0`."""
        metrics = self.folder / training / "metrics.jsonl"
        self.wait_until(job, lambda: metrics.exists() and metrics.stat().st_size > 0)

    def wait_for_restart(self, job: str, restarts: int = 1) -> None:
        """Until Slurm has put the job back into the queue, or has started it from there already."""
        self.wait_until(
            job,
            lambda: (
                self.cluster.job(job).restarts >= restarts
                and self.cluster.job(job).state in ("PENDING", "RUNNING", "COMPLETED")
            ),
        )

    def starts(self, name: str) -> list[dict[str, Any]]:
        starts: list[dict[str, Any]] = read_json(self.folder / name / "manifest.json")["starts"]
        return starts

    def require_no_process(self, name: str) -> None:
        """Nothing that works in this run directory is left."""
        wait_until(lambda: not processes_of(name), 10, lambda: f"left: {processes_of(name)}")


def processes_of(name: str, options: str = "") -> list[int]:
    """The processes whose command names the run directory, and in whose environment `wanted` is set."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if name.encode() in words and f"\0{options}" in "\0" + (folder / "environ").read_text(errors="replace"):
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def held_still(name: str) -> Iterator[None]:
    """The ranks of a run do nothing meanwhile; their launchers go on."""
    ranks = processes_of(name, "LOCAL_RANK=")
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    try:
        assert len(ranks) == 2, ranks
        yield
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
