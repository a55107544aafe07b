"""Several CIFAR trainings side by side on one GPU against one of them alone; one JSON line.

    python benchmarks/cifar.py cifar_side_by_side_8 [--small]

Pure steps: the images lie on the GPU, and nothing crops or flips them, in ours as in the reference. Every training
has its own weights, optimiser, CUDA stream and graph; one process feeds them in turn.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from our_steps import ADAM, Bench, Repeated, cifar_bench, resident_batches, setting
from record import publish, record_runs
from step_references import PlainStep, adam, network
from timing import extent, rates, synchronise

from trainer.loading.batch import Batch
from trainer.methods.standard import StandardTask

TRAININGS = 8


def side_by_side(bench: Bench, batches: Sequence[Batch], trainings: int) -> Callable[[], None]:
    """One step of each training, in its own stream."""
    tasks = [StandardTask(bench.model(seed), setting(bench, ADAM)) for seed in range(trainings)]
    steps = [Repeated(task, batches) for task in tasks]
    streams = [torch.cuda.Stream() if bench.device.type == "cuda" else None for _ in tasks]
    synchronise()  # weights and batches were made in the default stream

    def one() -> None:
        for step, stream in zip(steps, streams, strict=True):
            with _in(stream):
                step()

    return one


def _in(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def one_alone(bench: Bench, batches: Sequence[Batch]) -> Callable[[], None]:
    torch.manual_seed(0)
    step = PlainStep(network(bench.reference_network, bench.classes, bench.device), adam)
    turns = itertools.cycle(batches)

    def one() -> None:
        batch = next(turns)
        step(batch.images, batch.labels)

    return one


def figure(small: bool) -> dict[str, Any]:
    bench, rows = cifar_bench(small), 8 if small else 128
    batches = resident_batches(bench, rows)
    ways = {
        "reference": one_alone(bench, batches),
        "ours": side_by_side(bench, batches, TRAININGS),
        "ours, one training": side_by_side(bench, batches, 1),
    }
    counts = dict(zip(ways, (rows, TRAININGS * rows, rows), strict=True))
    found = rates(ways, counts, extent(small))
    note = (
        f"{bench.said}; {TRAININGS} trainings, batch {rows} each, Adam; steps on resident batches, no augmentation; "
        f"one of ours alone: {median(found['ours, one training']):,.0f} images/s; reference: one training, bf16 eager"
    )
    return record_runs("cifar_side_by_side_8", found["ours"], found["reference"], unit="images/s", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["cifar_side_by_side_8"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    publish([figure(given.small)])


if __name__ == "__main__":
    main()
