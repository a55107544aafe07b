"""Starts graph_ranks_program.py on several ranks of this machine, and compares what they wrote."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import REPOSITORY
from tests.support.processes import free_ports

PROGRAM = REPOSITORY / "tests" / "support" / "graph_ranks_program.py"
LIMIT = 300
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "ACCELERATE_", "SLURM_", "TORCHELASTIC_")

Told = dict[str, Any]


def told_by(ranks: int, folder: Path, kinds: Sequence[str]) -> list[Told]:
    """What each of so many processes on this machine wrote, by rank."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # Packages may lie where only PYTHONPATH tells of them.
    paths = [str(REPOSITORY), *filter(None, [plain.get("PYTHONPATH")])]
    plain |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*free_ports(1)), "WORLD_SIZE": str(ranks)}
    world |= {"LOCAL_WORLD_SIZE": str(ranks)}
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    command, processes = [sys.executable, str(PROGRAM), str(folder), *kinds], []
    try:
        for rank, log in enumerate(logs):
            own = {} if ranks == 1 else world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, env=plain | own, stdout=output, stderr=subprocess.STDOUT))
        limit = time.monotonic() + LIMIT
        codes = [process.wait(max(1.0, limit - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text() for log in logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def ids_of(stories: Sequence[Told]) -> list[list[list[int]]]:
    """By step and network, all ranks' chosen ids."""
    steps = zip(*(story["chosen"] for story in stories), strict=True)
    return [[sorted(chain(*parts)) for parts in zip(*of_ranks, strict=True)] for of_ranks in steps]


def assert_same_values(ours: Told, theirs: Told, rel: float) -> None:
    for one, other in zip(ours["values"], theirs["values"], strict=True):
        assert one == pytest.approx(other, rel=rel, abs=1e-6, nan_ok=True)
