"""Time variants of a step alternately in one process: images per second between two device syncs."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    runs: int = 3
    seconds: float = 2.5
    """Least length of a run."""
    steps: int = 10
    """Of the first try of a run, and of the warm-up."""


def extent(small: bool) -> Extent:
    return Extent(runs=2, seconds=0.0, steps=2) if small else Extent()


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def elapsed(job: Callable[[], object]) -> float:
    """Seconds from an idle GPU to an idle GPU."""
    synchronise()
    began = time.perf_counter()
    job()
    synchronise()
    return time.perf_counter() - began


def rates(
    ways: Mapping[str, Callable[[], object]], rows: Mapping[str, int], measure: Extent
) -> dict[str, list[float]]:
    """images/s of each way's step, run by run, A B A B; every way is warm before the first run of any.

    rows: images that a step of each way works on.
    """
    steps = {name: warmed_up(name, step, measure) for name, step in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(measure.runs):
        for name, step in ways.items():
            seconds = elapsed(partial(_repeat, step, steps[name]))
            found[name].append(rows[name] * steps[name] / seconds)
            said = f"{found[name][-1]:,.0f} images/s, {steps[name]} steps in {seconds:.2f} s"
            print(f"run {run}: {name} {said}", file=sys.stderr, flush=True)
    return found


def warmed_up(name: str, step: Callable[[], object], measure: Extent) -> int:
    """How many steps make a run long enough, once the step has its pace."""
    first = elapsed(step)
    print(f"{name}: first step {first:.1f} s", file=sys.stderr, flush=True)
    _repeat(step, measure.steps)
    took = elapsed(partial(_repeat, step, measure.steps))
    return max(measure.steps, math.ceil(measure.steps * 1.1 * measure.seconds / took))


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()
