"""torchrun without extra variables: a killed rank is restarted, an old STOP file is ignored."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shards.durable import read_json
from tests.support import RECIPES
from tests.support.processes import free_ports

pytestmark = pytest.mark.cluster
TINY = RECIPES / "tiny.yaml"
KEYS = ("execution.threads=1", "execution.lost_after=6", "execution.world=2", "methods=[standard]", "incv.epochs=20")


def command(run_dir: Path, port: int, stage: str = "run") -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    return [*launcher, "--max-restarts=2", "-m", "trainer", stage, "-c", str(TINY), "--run-dir", str(run_dir), *KEYS]


def pid_of_rank(run_dir: Path, rank: int) -> int:
    return int(read_json(run_dir / "logs" / f"heartbeat-rank{rank}.json")["pid"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage, then a STOP file that nobody means any more, then the whole run, of which rank 1 is killed."""
    folder = tmp_path_factory.mktemp("restarts")
    run_dir = folder / "run"
    labels_port, run_port = free_ports(2)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH", "INCV"))}
    environment = {**plain, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(run_dir, labels_port, "labels"), cwd=folder, env=environment, check=True, timeout=120)
    (run_dir / "STOP").touch()
    os.utime(run_dir / "STOP", (1e9, 1e9))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command(run_dir, run_port), cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        limit = time.monotonic() + 120
        progress = run_dir / "rounds/0/fold1/metrics.jsonl"
        while not (progress.exists() and progress.read_bytes().count(b"\n") > 10):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < limit
            time.sleep(0.01)
        os.kill(pid_of_rank(run_dir, 1), signal.SIGKILL)
        assert process.wait(180) == 0, (folder / "log").read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    return run_dir


def test_an_old_stop_file_is_removed_and_stops_nobody(run: Path) -> None:
    assert not (run / "STOP").exists()
    assert not (run / "stopped.json").exists()
    assert "older than this start" in (run.parent / "log").read_text()


def test_the_restarted_ranks_go_on_from_the_last_checkpoint(run: Path) -> None:
    _, killed, last = read_json(run / "manifest.json")["starts"]
    assert (killed["world"], last["world"]) == (2, 2)
    assert last["ended"] == "finished"
    assert last["resumed"]["incv/0/1"] > 0
    report = json.loads((run / "report.json").read_text())
    assert report
