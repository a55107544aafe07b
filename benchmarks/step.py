"""A training step on data resident on the GPU, ours and a plain port, in one process; one JSON line per figure.

    python benchmarks/step.py FIGURE [--small]

Ours is the trainer's own task, compiled and captured as in a run. The references are in step_references.py.
`--small` is a smoke test for any machine: a tiny network, a few steps, nothing compiled.
"""

import argparse
import gc
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import torch
from our_steps import SGD, Bench, Repeated, labelled, resident_batches, setting, webvision_bench
from record import publish, record_runs
from step_references import OneForwardCoteaching, PlainStep, RankedCoteaching, network
from timing import Extent, extent, rates

from trainer.acceleration.compile import compile_blocks
from trainer.loading.batch import Batch
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.networks import list_networks
from trainer.methods.standard import StandardTask
from trainer.models.twin import TwinModel

_PATIENCE = 200.0
"""Seconds after which one_pass, compiled from cold caches, leaves no time for eval_first in the same process."""


@dataclass(frozen=True)
class Rows:
    """Of a step: of S, of C, and how many each network keeps."""

    selected: int
    candidates: int = 0
    keep: int = 0

    @property
    def all(self) -> int:
        return self.selected + self.candidates

    @property
    def said(self) -> str:
        return f"{self.selected}{f' + {self.candidates}' if self.candidates else ''} rows, keep {self.keep}"


def coteaching_rows(small: bool, candidates: bool) -> Rows:
    if small:
        return Rows(8, 4, 8) if candidates else Rows(8, 0, 7)
    return Rows(128, 64, 128) if candidates else Rows(128, 0, 115)


def our_coteaching(
    bench: Bench, rows: Rows, rank: Literal["one_pass", "eval_first"], batches: list[Batch]
) -> Callable[[], None]:
    forget_schedule = ForgetSchedule(rows.selected, 1 - rows.keep / rows.selected, 10)
    task = CoteachingTask(TwinModel(bench.model(0), bench.model(1)), setting(bench, SGD), forget_schedule, rank)
    return Repeated(task, batches, rows.candidates)


def ported_coteaching(
    bench: Bench, rows: Rows, way: type[RankedCoteaching | OneForwardCoteaching], batches: list[Batch]
) -> Callable[[], None]:
    torch.manual_seed(0)
    step = way(*(network(bench.reference_network, bench.classes, bench.device) for _ in range(2)))
    turns = labelled(bench, batches)

    def one() -> None:
        batch, labels = next(turns)
        step(batch.images, labels, rows.keep)

    return one


def ported_single(bench: Bench, batches: list[Batch]) -> Callable[[], None]:
    torch.manual_seed(0)
    step = PlainStep(network(bench.reference_network, bench.classes, bench.device))
    turns = labelled(bench, batches)

    def one() -> None:
        batch, labels = next(turns)
        step(batch.images, labels)

    return one


def coteaching_ways(
    bench: Bench, rows: Rows, rank: Literal["one_pass", "eval_first"], batches: list[Batch]
) -> dict[str, Callable[[], None]]:
    return {
        "reference": ported_coteaching(bench, rows, RankedCoteaching, batches),
        rank: our_coteaching(bench, rows, rank, batches),
    }


def coteaching_b128(small: bool) -> list[dict[str, Any]]:
    """one_pass, and eval_first beside it where the compilation left time."""
    began, bench, rows = time.monotonic(), webvision_bench(small), coteaching_rows(small, candidates=False)
    batches = resident_batches(bench, rows.all)
    ways = coteaching_ways(bench, rows, "one_pass", batches)
    found = rates(ways, dict.fromkeys(ways, rows.all), extent(small))
    note, lines = _coteaching_note(bench, rows), []
    if time.monotonic() - began < _PATIENCE:
        lines = _eval_first_beside(bench, rows, batches, ways["reference"], note, extent(small))
    if lines:
        note += f"; eval_first: {lines[0]['value']:,.0f} images/s, {lines[0]['ratio']} times its reference"
    else:
        note += "; eval_first: not measured in this process, see its own line"
    first = record_runs("coteaching_step_b128", found["one_pass"], found["reference"], unit="images/s", note=note)
    return [first, *lines]


def _eval_first_beside(
    bench: Bench, rows: Rows, batches: list[Batch], reference: Callable[[], None], note: str, measure: Extent
) -> list[dict[str, Any]]:
    """No line where it fails: what was measured before it is not lost, and its own figure shows the error."""
    try:
        ways = {"reference": reference, "eval_first": our_coteaching(bench, rows, "eval_first", batches)}
        return [_eval_first_line(rates(ways, dict.fromkeys(ways, rows.all), measure), note)]
    except RuntimeError as error:
        print(f"eval_first failed: {error}", file=sys.stderr)
        return []


def coteaching_b128_eval_first(small: bool) -> list[dict[str, Any]]:
    bench, rows = webvision_bench(small), coteaching_rows(small, candidates=False)
    batches = resident_batches(bench, rows.all)
    ways = coteaching_ways(bench, rows, "eval_first", batches)
    found = rates(ways, dict.fromkeys(ways, rows.all), extent(small))
    return [_eval_first_line(found, _coteaching_note(bench, rows))]


def coteaching_b128_c64(small: bool) -> list[dict[str, Any]]:
    bench, rows = webvision_bench(small), coteaching_rows(small, candidates=True)
    batches = resident_batches(bench, rows.all)
    ways = coteaching_ways(bench, rows, "one_pass", batches)
    found = rates(ways, dict.fromkeys(ways, rows.all), extent(small))
    note = f"{_coteaching_note(bench, rows)}; all {rows.all} rows of a step are counted"
    return [
        record_runs("coteaching_step_b128_c64", found["one_pass"], found["reference"], unit="images/s", note=note)
    ]


def _coteaching_note(bench: Bench, rows: Rows) -> str:
    return f"{bench.said}; {rows.said}; reference: ranked in eval mode, then trained on the chosen rows, bf16 eager"


def _eval_first_line(found: dict[str, list[float]], note: str) -> dict[str, Any]:
    name = "coteaching_step_b128_eval_first"
    return record_runs(name, found["eval_first"], found["reference"], unit="images/s", note=note)


def single(small: bool, batch: int, absolute: bool) -> list[dict[str, Any]]:
    bench, rows = webvision_bench(small), 8 if small else batch
    batches = resident_batches(bench, rows)
    task = StandardTask(bench.model(0), setting(bench, SGD))
    ways: dict[str, Callable[[], None]] = {
        "reference": ported_single(bench, batches),
        "ours": Repeated(task, batches),
    }
    found = rates(ways, dict.fromkeys(ways, rows), extent(small))
    name, note = f"single_step_b{batch}", f"{bench.said}; one network, batch {rows}"
    if absolute:
        note += f"; bf16 channels-last eager in the same process: {median(found['reference']):,.0f} images/s"
        return [record_runs(name, found["ours"], unit="images/s", note=note)]
    note += "; reference: bf16 channels-last eager"
    return [record_runs(name, found["ours"], found["reference"], unit="images/s", note=note)]


def joined_heads(small: bool) -> list[dict[str, Any]]:
    """The step with the heads of parallel branches joined, as a run has it, against the same compiled as written."""
    bench, rows = webvision_bench(small), 8 if small else 128
    batches, plain = resident_batches(bench, rows), setting(bench, SGD)
    ours = StandardTask(bench.model(0), plain)
    as_written = StandardTask(bench.model(0), replace(plain, compile=False))
    if bench.fast:
        for each in list_networks(as_written.module):
            compile_blocks(each, "inductor")
    ways = {"reference": Repeated(as_written, batches), "ours": Repeated(ours, batches)}
    found = rates(ways, dict.fromkeys(ways, rows), extent(small))
    note = f"{bench.said}; one network, batch {rows}; reference: the same step, compiled with every head by itself"
    return [record_runs("joined_heads_b128", found["ours"], found["reference"], unit="images/s", note=note)]


def memory(small: bool) -> list[dict[str, Any]]:
    """Peaks of one side after the other, each alone on the device."""
    bench, rows, measure = webvision_bench(small), coteaching_rows(small, candidates=False), extent(small)
    batches = resident_batches(bench, rows.all)
    references = _peaks(lambda: ported_coteaching(bench, rows, OneForwardCoteaching, batches), measure)
    ours = _peaks(lambda: our_coteaching(bench, rows, "one_pass", batches), measure)
    note = (
        f"{bench.said}; {rows.said}; one_pass; most memory allocated over {measure.steps} steps after warm-up, the "
        "scratch memory of CUDA graphs counted as allocated; reference: two separate networks, one forward of each, "
        "bf16 eager"
    )
    if bench.device.type != "cuda":
        note += "; no GPU: the process's own high-water mark, which tells nothing"
    return [record_runs("coteaching_memory_b128", ours, references, unit="MB", note=note)]


def _peaks(make: Callable[[], Callable[[], None]], measure: Extent) -> list[float]:
    """MB of each run; what was made is gone afterwards."""
    step = make()
    for _ in range(measure.steps):
        step()
    peaks = [_peak(step, measure.steps) for _ in range(measure.runs)]
    del step
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return peaks


def _peak(step: Callable[[], None], steps: int) -> float:
    if not torch.cuda.is_available():
        step()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() + _graph_scratch()) / 1e6


def _graph_scratch() -> int:
    """Bytes that replays of CUDA graphs work in and the allocator counts as free: the rest of their private pools."""
    segments = torch.cuda.memory_snapshot()
    private = [one for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(one["total_size"] - one["allocated_size"] for one in private)


FIGURES: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "coteaching_step_b128": coteaching_b128,
    "coteaching_step_b128_eval_first": coteaching_b128_eval_first,
    "coteaching_step_b128_c64": coteaching_b128_c64,
    "single_step_b128": lambda small: single(small, 128, absolute=False),
    "single_step_b512": lambda small: single(small, 512, absolute=True),
    "coteaching_memory_b128": memory,
    "joined_heads_b128": joined_heads,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    publish(FIGURES[given.figure](given.small))


if __name__ == "__main__":
    main()
