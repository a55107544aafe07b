"""Seconds from the start of Python to the end of the first step, compiled and captured; one JSON line.

    python benchmarks/warm_start.py [--small]

Each start is its own process: with an empty compile cache, with a copy of a filled cache at another path (another
node), and with the filled cache itself (a restart). `--small` is a smoke test for any machine: a network of two
blocks and no CUDA graph.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from our_steps import SGD, Bench, Repeated, resident_batches, setting, webvision_bench
from record import publish, record
from timing import synchronise
from torch import nn

from trainer.methods.standard import StandardTask

_RUNS = 3
_PATIENCE = 400.0
"""Seconds in which a further start must end; a figure has eight minutes."""
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Start:
    seconds: float
    compiled: int
    """Graphs that no cache had."""
    served: int


def first_step(small: bool) -> dict[str, int]:
    """What the started process does; returns how many graphs it compiled and how many a cache served."""
    from torch._dynamo.utils import counters  # here: the time it takes belongs to the start

    torch.backends.cudnn.benchmark = True
    bench = webvision_bench(small)
    how = replace(setting(bench, SGD), compile=True)
    task = StandardTask(_two_blocks(bench) if small else bench.model(0), how)
    Repeated(task, resident_batches(bench, _rows(small), 1))()
    synchronise()
    found = counters["inductor"]
    return {"compiled": found["fxgraph_cache_miss"], "served": found["fxgraph_cache_hit"]}


def _rows(small: bool) -> int:
    return 8 if small else 128


def _two_blocks(bench: Bench) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * bench.pixels**2, bench.classes))


def start(small: bool, cache: Path) -> Start:
    """Start a process with this compile cache, until its first step is done."""
    command = [sys.executable, __file__, "--first-step", *(["--small"] if small else [])]
    environ = {name: value for name, value in os.environ.items() if name not in _CACHE_VARIABLES}
    environ["INCV_COMPILE_CACHE"] = str(cache)
    began, found = time.perf_counter(), None
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith('{"compiled"'):
                found = Start(time.perf_counter() - began, **json.loads(text))
            else:
                print(text, end="", file=sys.stderr)
    if process.returncode != 0 or found is None:
        sys.exit(f"a started process ended with code {process.returncode}; its own words are above")
    said = f"{found.seconds:.1f} s, {found.compiled} graphs compiled, {found.served} from a cache"
    print(said, file=sys.stderr, flush=True)
    return found


def figure(small: bool, folder: Path) -> dict[str, Any]:
    bench, began = webvision_bench(small), time.monotonic()
    if not small:
        start(True, folder / "rehearsal")  # not counted: files of torch and of the compiler come from memory
    filled = folder / "filled"
    cold = start(small, filled)
    copies = [folder / f"copy{number}" for number in range(1 if small else _RUNS)]
    for copy in copies:
        shutil.copytree(filled, copy)
    local = start(small, filled)
    by_copy = [start(small, copies[0])]
    while len(by_copy) < len(copies) and time.monotonic() - began + by_copy[-1].seconds < _PATIENCE:
        by_copy.append(start(small, copies[len(by_copy)]))
    seconds = [each.seconds for each in by_copy]
    network = "a network of two blocks" if small else bench.said
    note = (
        f"{network}; batch {_rows(small)}, one network; reference: an empty cache, once; by the filled cache itself"
        f": {local.seconds:.1f} s, once; graphs compiled anew: {cold.compiled} cold, "
        f"{max(each.compiled for each in by_copy)} by a copy, {local.compiled} by the filled cache"
    )
    spread = max(seconds) - min(seconds)
    return record(
        "warm_start_s", median(seconds), cold.seconds, runs=len(by_copy), spread=spread, unit="s", note=note
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny network, to try the script")
    parser.add_argument("--first-step", action="store_true", help="what each started process is told")
    given = parser.parse_args()
    if given.first_step:
        print(json.dumps(first_step(given.small)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        publish([figure(given.small, Path(folder))])


if __name__ == "__main__":
    main()
