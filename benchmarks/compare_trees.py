"""The same figure from two checkouts of this repository, in alternating runs on one GPU.

    python benchmarks/compare_trees.py OLD_TREE NEW_TREE [FIGURE ...] [--prepare] [--small] [--results FILE]

Each tree runs in its own process. Both compile at the same time, then alternate: one does a timed run while the
other waits. `value` is the new tree's median, `reference` the old tree's. `--prepare` measures nothing: it compiles
what the figures need, all at once, so that a later call on this machine finds it in the compile cache.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

SCRIPTS = {
    "coteaching_step_b128": "step",
    "single_step_b512": "step",
    "end_to_end_b256": "end_to_end",
    "predict_end_to_end": "end_to_end",
    "cifar_folds_side_by_side_8": "cifar",
}
"""The script in `benchmarks/` that has each figure."""
RUNS = 3
_OTHER_WAYS = ("reference", "decoding", "forward", "ours, one run")


def wait_for_turn() -> None:
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        sys.exit(0)


def work(figure: str, small: bool) -> None:
    """The worker, with one tree's `benchmarks/` and root first on the path: report images/s whenever told to go."""
    import torch
    from timing import _repeat, elapsed, synchronise, warmed_up

    torch.backends.cudnn.benchmark = True

    def take_turns(
        ways: Mapping[str, Callable[[], object]], rows: Mapping[str, int], measure: Any
    ) -> dict[str, list[float]]:
        name = next(name for name in ways if name not in _OTHER_WAYS)
        steps = warmed_up(name, ways[name], measure)
        while True:
            wait_for_turn()
            seconds = elapsed(lambda: _repeat(ways[name], steps))
            print(json.dumps(rows[name] * steps / seconds), flush=True)

    def timed(batches: Any, *others: Any) -> Any:
        sizes = next(each for each in others if hasattr(each, "lead_in"))
        yield from islice(batches, sizes.lead_in)
        for _ in itertools.count():
            wait_for_turn()
            yield from islice(batches, sizes.lead_in)  # uses up what was loaded ahead while waiting
            synchronise()
            began = time.perf_counter()
            yield from islice(batches, sizes.steps)
            synchronise()
            print(json.dumps(sizes.batch * sizes.steps / (time.perf_counter() - began)), flush=True)

    script = __import__(SCRIPTS[figure])
    script.rates = take_turns
    if SCRIPTS[figure] == "end_to_end":
        script._timed = timed
        sys.argv = ["end_to_end.py", figure, *(["--small"] if small else [])]
        script.main()
    else:
        script.FIGURES[figure](small)


def start_worker(tree: Path, figure: str, small: bool, scratch: str) -> subprocess.Popen[str]:
    """scratch: for shards and run directories, which a worker that is killed leaves behind."""
    paths = [tree / "benchmarks", tree, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONSAFEPATH": "1",
        "TMPDIR": scratch,
    }
    command = [sys.executable, __file__, "--worker", figure, *(["--small"] if small else [])]
    return subprocess.Popen(
        command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_line(worker: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
    assert worker.stdout is not None
    for line in worker.stdout:
        if wanted(line.strip()):
            return line.strip()
    raise RuntimeError(f"a worker ended with {worker.wait()}")


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def compare(trees: Mapping[str, Path], figure: str, small: bool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as scratch:
        workers = {name: start_worker(tree, figure, small, scratch) for name, tree in trees.items()}
        try:
            for worker in workers.values():
                read_line(worker, lambda line: line == "ready")
            for run in range(RUNS):
                for name, worker in workers.items():
                    assert worker.stdin is not None
                    worker.stdin.write("go\n")
                    worker.stdin.flush()
                    found[name].append(float(read_line(worker, is_number)))
                    read_line(worker, lambda line: line == "ready")
                    print(f"{figure} run {run}: {name} {found[name][-1]:,.0f} images/s", file=sys.stderr, flush=True)
        finally:
            end(workers.values())
    return found


def prepare(trees: Iterable[Path], figures: Iterable[str], small: bool) -> None:
    """Start every figure of every tree at once, up to the moment when it could be measured."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        workers = [start_worker(tree, figure, small, scratch) for tree in trees for figure in figures]
        try:
            for worker in workers:
                read_line(worker, lambda line: line == "ready")
        finally:
            end(workers)
    print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def end(workers: Iterable[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], "--small" in sys.argv)
        return
    import torch  # noqa: F401  a line then names the GPU
    from record import record_runs

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("figures", nargs="*", default=list(SCRIPTS), help=f"default: {', '.join(SCRIPTS)}")
    parser.add_argument("--prepare", action="store_true", help="fill the compile cache")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--results", type=Path, help="a file to append the lines to")
    given = parser.parse_args()
    trees = {"old": given.old.resolve(), "new": given.new.resolve()}
    if given.prepare:
        prepare(trees.values(), given.figures, given.small)
        return
    failed = []
    for figure in given.figures:
        try:
            found = compare(trees, figure, given.small)
        except RuntimeError as error:  # the figures after it can still be measured
            print(f"{figure}: {error}", file=sys.stderr, flush=True)
            failed.append(figure)
            continue
        line = record_runs(f"compare_{figure}", found["new"], found["old"], unit="images/s", note="old: reference")
        print(json.dumps(line), flush=True)
        if given.results is not None:
            with given.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
