"""The INCV stage with its two folds side by side, against the folds in turn; one JSON line per figure.

    python benchmarks/folds_side_by_side.py [--append] [a.b=c ...]

`recipes/tiny.yaml` with more epochs, one thread per process: two processes with one fold each; one process with the
folds in turn; two processes that train each fold together. The time is that of the stage in the run's manifest,
without process start-up. The folds' metrics.jsonl files are polled to check that both folds advance concurrently.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from company import Others, said_of, wait_for_quiet
from record import publish, record, record_runs

ROOT = Path(__file__).parents[1]
SIDE_BY_SIDE, ALONE, TOGETHER = (
    "two processes, a fold each",
    "one process, in turn",
    "two processes, in turn",
)
WAYS = {SIDE_BY_SIDE: (2, "side_by_side"), ALONE: (1, "in_turn"), TOGETHER: (2, "in_turn")}
_PERIOD = 0.05


@dataclass
class Stage:
    """One INCV stage as it was run."""

    seconds: float
    overlap: float
    steps: int
    checksum: str
    others: float


@dataclass
class StepTimes:
    """When each fold of each round was seen to make its first and its last step, by the lines of its metrics."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def look(self) -> None:
        now = time.monotonic()
        for file in self.folder.glob("rounds/*/fold*/metrics.jsonl"):
            fold = f"{file.parent.parent.name}.{file.parent.name.removeprefix('fold')}"
            count = len(file.read_bytes().splitlines())
            if count > self.counts.get(fold, 0):
                self.counts[fold] = count
                self.first.setdefault(fold, now)
                self.last[fold] = now

    def overlap(self) -> float:
        """Share of the time in which any fold of a round makes steps that both do, over all rounds."""
        common = whole = 0.0
        for one in sorted(name for name in self.first if name.endswith(".0")):
            other = f"{one[:-1]}1"
            begins, ends = (self.first[one], self.first[other]), (self.last[one], self.last[other])
            shared = max(0.0, min(ends) - max(begins))
            common += shared
            whole += sum(ends) - sum(begins) - shared
        return common / whole


def arguments(stage: str, run: Path, overrides: Sequence[str]) -> list[str]:
    recipe = str(ROOT / "recipes" / "tiny.yaml")
    execution = ("execution.threads=1", "execution.log_every=1")
    return ["-m", "trainer", stage, "-c", recipe, "--run-dir", str(run), *execution, *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def prepared(place: Path, overrides: Sequence[str]) -> Path:
    """A run directory whose next stage is INCV; the shards lie beside it."""
    run = place / "prepared"
    command = [sys.executable, *arguments("labels", run, overrides)]
    subprocess.run(command, cwd=place, env=environment(), check=True, stderr=subprocess.DEVNULL)
    return run


def run_eagerly(way: str, start: Path, overrides: Sequence[str]) -> Stage:
    """The INCV stage of a copy of the prepared run."""
    processes, folds = WAYS[way]
    run = start.with_name("measured")
    shutil.copytree(start, run)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    said = [*overrides, f"execution.world={processes}", f"execution.folds={folds}"]
    command = [sys.executable, *(launcher if processes > 1 else []), *arguments("incv", run, said)]
    others, times = Others(), StepTimes(run)
    with (start.parent / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=start.parent, env=environment(), stdout=log, stderr=log)
        while process.poll() is None:
            times.look()
            time.sleep(_PERIOD)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{log.read()}\n{way}: ended with {process.returncode}")
    share = others.share()
    manifest = json.loads((run / "manifest.json").read_text())
    checksum = json.loads((run / "incv.json").read_text())["selection_checksum"]
    last_start = manifest["starts"][-1]
    assert (last_start["world"], last_start["threads"]) == (processes, 1), "not the processes that were asked for"
    steps = sum(last_start["steps_executed"].values())
    shutil.rmtree(run)
    return Stage(manifest["stages"]["incv"]["seconds"], times.overlap(), steps, checksum, share)


def measure(rounds: int, patience: float, overrides: Sequence[str]) -> dict[str, list[Stage]]:
    """The three ways in turn, so that they meet the same moods of the machine."""
    stages: dict[str, list[Stage]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        start = prepared(Path(name), overrides)
        for _ in range(rounds):
            for way, done in stages.items():
                wait_for_quiet(patience)
                stage = run_eagerly(way, start, overrides)
                print(f"{way}: {stage}", file=sys.stderr)
                done.append(stage)
    if len({stage.checksum for way in (SIDE_BY_SIDE, ALONE) for stage in stages[way]}) > 1:
        sys.exit("the folds side by side selected other samples than the folds in turn: this is no fair comparison")
    return stages


def lines_of(stages: dict[str, list[Stage]], overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Speeds are told in stages an hour, so that a ratio says how many times faster."""
    said = f"INCV stage of recipes/tiny.yaml with {' '.join(overrides)}, one thread a process"
    company = said_of([stage.others for done in stages.values() for stage in done])
    lines = []
    for name, other in (("folds_side_by_side", ALONE), ("folds_side_by_side_ddp", TOGETHER)):
        note = "; ".join([said, _seconds(SIDE_BY_SIDE, stages), f"reference: {_seconds(other, stages)}", company])
        values, references = ([3600 / one.seconds for one in stages[way]] for way in (SIDE_BY_SIDE, other))
        lines.append(record_runs(name, values, references, unit="stages/h", note=note))
    overlaps = {way: [one.overlap for one in done] for way, done in stages.items()}
    ours, most = overlaps[SIDE_BY_SIDE], max(overlaps[ALONE] + overlaps[TOGETHER])
    note = (
        f"{said}; between a fold's first and last step as seen by reading its metrics every "
        f"{_PERIOD * 1000:.0f} ms: time common to both folds of a round, of the time of either; "
        f"the folds in turn: at most {most:.3f}"
    )
    spread = max(ours) - min(ours)
    return [*lines, record("folds_overlap", median(ours), runs=len(ours), spread=spread, unit="share", note=note)]


def _seconds(way: str, stages: dict[str, list[Stage]]) -> str:
    taken = [stage.seconds for stage in stages[way]]
    return f"{way}: {median(taken):.1f} s ({min(taken):.1f} to {max(taken):.1f}), {stages[way][0].steps} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60, help="of a fold; 60 take one process about 20 s")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine, each run")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/folds_side_by_side.jsonl")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="recipe keys to change")
    given = parser.parse_args()
    overrides = [f"incv.epochs={given.epochs}", *given.overrides]
    lines = lines_of(measure(given.rounds, given.patience, overrides), overrides)
    publish(lines, "folds_side_by_side.jsonl" if given.append else None)


if __name__ == "__main__":
    main()
