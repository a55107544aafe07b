"""The sample index at real size: open it, share it between processes, order an epoch; one JSON line per figure.

.venv/bin/python benchmarks/index_scale.py --append

Each figure comes from fresh processes that import the index and the order but not torch. `--rows` is WebVision's
2.44 million; the figures of `--large` are compared with ten times as many rows at the same cost per row.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from made_up_index import make_index
from record import publish, record_runs

ROOT = Path(__file__).parents[1]
PROCESSES = 4  # ranks of a node
_IMPORTS = """
import sys, time
from pathlib import Path
import numpy as np
from shards.sample_index import NUMERIC, SampleIndex
from trainer.loading.sample_order import epoch_order, derive_stream
assert "torch" not in sys.modules
def done(value):
    print(value, flush=True)
    sys.stdin.readline()
"""
_OPEN = """
start = time.perf_counter()
index = SampleIndex.load(Path(sys.argv[1]))
done(time.perf_counter() - start)
"""
_ORDER = """
ids, stream = SampleIndex.load(Path(sys.argv[1])).usable_ids(), derive_stream(0, "standard")
start = time.perf_counter()
order = epoch_order(stream, 3, ids)
done(time.perf_counter() - start)
"""
_HOLD = """
index = SampleIndex.load(Path(sys.argv[1]))
touched = [int(np.add.reduce(getattr(index, name), dtype=np.int64)) for name in NUMERIC]
order = epoch_order(derive_stream(0, "standard"), 3, index.usable_ids())
done(len(order))
"""


def begin(program: str, folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _IMPORTS + program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def answer(process: "subprocess.Popen[str]") -> float:
    """The number a process prints when it is done; it then waits to be let go."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a measured process ended with {process.wait()}")
    return float(line)


def let_go(process: "subprocess.Popen[str]") -> None:
    process.communicate("\n")


def seconds(program: str, folder: Path) -> float:
    process = begin(program, folder)
    took = answer(process)
    let_go(process)
    return took


def proportional_megabytes(program: str, folder: Path) -> float:
    """Of PROCESSES processes together, as the kernel shares pages out among those that map them."""
    processes = [begin(program, folder) for _ in range(PROCESSES)]
    for process in processes:
        answer(process)
    total = sum(_pss(process.pid) for process in processes)
    for process in processes:
        let_go(process)
    return total


def _pss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError("Pss")


def measure(folder: Path, rows: int, large: int, runs: int) -> list[dict[str, Any]]:
    """What is held against each other is measured in turn, so that both meet the same moods of the machine."""
    small_index, large_index = folder / "small", folder / "large"
    make_index(small_index, rows)
    make_index(large_index, large)
    size = (small_index / "index.arrow").stat().st_size / 1e6
    said = f"{rows:,} rows, index.arrow {size:,.0f} MB, in the page cache"
    linear = f"{large:,} rows; reference: the time of {rows:,} rows, times {large / rows:.4g}; ratio 1 is linear"
    lines = []
    for name, program, what in (
        ("index_open", _OPEN, "SampleIndex.load in a fresh process"),
        ("epoch_order", _ORDER, "epoch_order of all usable ids in a fresh process"),
    ):
        pairs = [(seconds(program, small_index), seconds(program, large_index)) for _ in range(runs)]
        small_times, large_times = zip(*pairs, strict=True)
        lines.append(record_runs(f"{name}_s", small_times, unit="s", note=f"{said}; {what}"))
        grown = [one * large / rows for one in small_times]
        lines.append(record_runs(f"{name}_large_s", large_times, grown, unit="s", note=f"{linear}; {what}"))
    return lines + memory_lines(small_index, runs, said)


def memory_lines(index: Path, runs: int, said: str) -> list[dict[str, Any]]:
    pairs = [(proportional_megabytes(_HOLD, index), proportional_megabytes("done(0)", index)) for _ in range(runs)]
    held = f"{said}; {PROCESSES} processes together, all numeric columns touched, an epoch's order held"
    return [
        record_runs("index_pss_mb", [one for one, _ in pairs], unit="MB", note=f"{held}; with the interpreters"),
        record_runs(
            "index_pss_increase_mb",
            [one - bare for one, bare in pairs],
            unit="MB",
            note=f"{held}; less what processes take that only imported",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The sample index at real size.")
    parser.add_argument("--rows", type=int, default=2_440_000)
    parser.add_argument("--large", type=int, default=25_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the made-up indexes lie for a while; default: a new one")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/index_scale.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        lines = measure(Path(name), arguments.rows, arguments.large, arguments.runs)
    publish(lines, "index_scale.jsonl" if arguments.append else None)


if __name__ == "__main__":
    main()
