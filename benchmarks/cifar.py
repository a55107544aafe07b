"""Several CIFAR trainings side by side on one GPU against a single one; one JSON line.

    python benchmarks/cifar.py FIGURE [--small]

`cifar_side_by_side_8`: bare steps. The images are resident on the GPU, with no crops or flips, in ours and in the
reference. Each training has its own weights, optimiser, CUDA stream and graph; one process feeds them in turn.
`cifar_runs_side_by_side_8`: the trainer's own loop and lanes, as in `incv run --vary`, with all the work of a run:
order, crops, flips, metrics, counters, heartbeat. The reference is still the bare step.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from our_steps import ADAM, Bench, Repeated, cifar_bench, image_set, resident_batches, setting, surroundings
from packed_jpegs import linked_tree, make_jpegs, packed
from record import publish, record_runs
from step_references import PlainStep, adam, network
from timing import extent, rates, synchronise

from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.loading.batch import Batch
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import TrainingPlan, derive_stream
from trainer.methods.standard import StandardTask
from trainer.training.interleave import interleave
from trainer.training.loop import TrainingJob, iterate_training

TRAININGS = 8
EPOCHS = 1000
_MADE_UP = 64


def fed_in_turn(bench: Bench, batches: Sequence[Batch], trainings: int) -> Callable[[], None]:
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


def opened(bench: Bench, scratch: Path, samples: int) -> ImageSet:
    """Small pictures, kept decoded on the device as CIFAR's are."""
    make_jpegs(scratch / "made-up", _MADE_UP, bench.pixels)
    linked_tree(scratch / "made-up", scratch, samples)
    index = packed(scratch, os.cpu_count() or 1)
    image, execution = ImageConfig(size=bench.pixels, pad=4), ExecutionConfig(loader="resident")
    return image_set(bench, index, image, execution)


def run_of(bench: Bench, data: ImageSet, rows: int, seed: int, root: Path) -> Generator[None, None, None]:
    """A training as a run makes it, a step at a time."""
    plan = TrainingPlan(derive_stream(seed, "benchmark"), data.ids, rows, EPOCHS)
    form = setting(bench, ADAM, plan.steps_per_epoch)
    task = StandardTask(bench.model(seed), form)
    ctx = surroundings(root, form.world)
    return iterate_training(
        TrainingJob("standard", root / "standard"),
        task,
        plan,
        lambda first: data.training_batches(plan, first, form.world),
        ctx,
    )


def runs_figure(small: bool) -> dict[str, Any]:
    bench, rows, samples = cifar_bench(small), 8 if small else 128, 48 if small else 10_000
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        data = opened(bench, scratch, samples)

        def lanes(first: int, count: int) -> Generator[None, None, list[None]]:
            seeds = range(first, first + count)
            runs = [run_of(bench, data, rows, seed, scratch / f"run{seed}") for seed in seeds]
            return interleave(runs, bench.device)

        with closing(lanes(0, TRAININGS)) as together, closing(lanes(TRAININGS, 1)) as alone:
            ways: dict[str, Callable[[], object]] = {
                "reference": one_alone(bench, resident_batches(bench, rows)),
                "ours": lambda: next(together),
                "ours, one run": lambda: next(alone),
            }
            found = rates(ways, dict(zip(ways, (rows, TRAININGS * rows, rows), strict=True)), extent(small))
        data.close()
    note = (
        f"{bench.said}; {TRAININGS} runs of the trainer's loop, batch {rows} each, Adam; {samples:,} pictures, "
        f"cropped and flipped, no checkpoint due; one of ours alone: {median(found['ours, one run']):,.0f} images/s; "
        "reference: one training, bf16 eager, steps on resident batches, no augmentation"
    )
    return record_runs("cifar_runs_side_by_side_8", found["ours"], found["reference"], unit="images/s", note=note)


def steps_figure(small: bool) -> dict[str, Any]:
    bench, rows = cifar_bench(small), 8 if small else 128
    batches = resident_batches(bench, rows)
    ways = {
        "reference": one_alone(bench, batches),
        "ours": fed_in_turn(bench, batches, TRAININGS),
        "ours, one training": fed_in_turn(bench, batches, 1),
    }
    counts = dict(zip(ways, (rows, TRAININGS * rows, rows), strict=True))
    found = rates(ways, counts, extent(small))
    note = (
        f"{bench.said}; {TRAININGS} trainings, batch {rows} each, Adam; steps on resident batches, no augmentation; "
        f"one of ours alone: {median(found['ours, one training']):,.0f} images/s; reference: one training, bf16 eager"
    )
    return record_runs("cifar_side_by_side_8", found["ours"], found["reference"], unit="images/s", note=note)


FIGURES = {"cifar_side_by_side_8": steps_figure, "cifar_runs_side_by_side_8": runs_figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    publish([FIGURES[given.figure](given.small)])


if __name__ == "__main__":
    main()
