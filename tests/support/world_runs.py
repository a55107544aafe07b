"""Runs of recipes/tiny.yaml at several world sizes, and what their ranks logged of each step."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import REPOSITORY, processes
from trainer.incv.selection_index import SelectionIndex, State

DRIVER = Path(__file__).with_name("many_runs.py")
EXECUTION = ("execution.threads=1", "execution.trace=true", "execution.log_every=50", "execution.lost_after=20")

Line = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """One run of a plan, to its end or until a stop is asked for after a step of a training."""

    name: str
    overrides: tuple[str, ...]
    stop: tuple[str, int] | None = None


def launch(place: Path, size: int, plan: list[Planned], seconds: float = 400, packages: Sequence[Path] = ()) -> None:
    """Carry a plan out, each run in `place/<name>`: by torchrun, or by one process without a launcher for size 1.

    packages: folders of installed packages, for the processes.
    """
    ports = iter(processes.free_ports(len(plan)))
    entries = [
        {
            "arguments": arguments(place / each.name, f"execution.world={size}", *each.overrides),
            "port": next(ports),
            "stop": each.stop,
        }
        for each in plan
    ]
    file = place / f"plan-{plan[0].name}-{size}.json"
    file.write_text(json.dumps(entries))
    log = file.with_suffix(".log")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"] if size > 1 else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *torchrun, str(DRIVER), str(file)],
            cwd=place,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, [*packages, REPOSITORY]))},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    assert finish(process, seconds) == 0, log.read_text()


def finish(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Its exit code; a launcher that hangs is told to end its workers before it is killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        processes.finish(process, 40)
        raise


def arguments(run_dir: Path, *overrides: str) -> list[str]:
    return ["run", "-c", str(processes.RECIPE), "--run-dir", str(run_dir), *EXECUTION, *overrides]


def world_size(run_dir: Path) -> int:
    """As the last start recorded it."""
    return int(json.loads((run_dir / "manifest.json").read_text())["starts"][-1]["world"])


def traced(run_dir: Path) -> dict[tuple[str, int], list[Line]]:
    """For each training and step the lines of the ranks that made it, by rank."""
    steps: dict[tuple[str, int], list[Line]] = {}
    files = sorted((run_dir / "logs").glob("trace-rank*.jsonl"), key=lambda file: int(file.stem.split("rank")[1]))
    for file in files:
        for text in file.read_text().splitlines():
            line = json.loads(text)
            steps.setdefault((line["training"], line["step"]), []).append(line)
    return steps


def joined(lines: list[Line], selected: set[int] | None) -> list[tuple[int, list[int], int]]:
    """The step's rows (id, box, flip) in the order of one process: all ranks' rows of S, then all ranks' of C.

    selected: S, where rows of C are among them; None: there is no C.
    """
    rows = [list(zip(line["ids"], line["boxes"], line["flips"], strict=True)) for line in lines]
    every = [row for part in rows for row in part]
    if selected is None:
        return every
    return [row for row in every if row[0] in selected] + [row for row in every if row[0] not in selected]


def selected_ids(run_dir: Path) -> set[int]:
    return set(SelectionIndex.read(run_dir / "selection.parquet").ids(State.SELECTED).tolist())
