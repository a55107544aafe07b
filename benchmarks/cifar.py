"""Several CIFAR trainings side by side on one GPU against a single one; one JSON line.

    python benchmarks/cifar.py FIGURE [--small]

`cifar_side_by_side_8`: bare steps. The images are resident on the GPU, with no crops or flips, in ours and in the
reference. Each training has its own weights, optimiser, CUDA stream and graph; one process feeds them in turn.
`cifar_folds_side_by_side_8`: eight folds on 50,000 images in the trainer's own loop and lanes, with all that a run
does: order, crops, flips, metrics, counters, heartbeat, checkpoints. The reference is as many bare steps of eight
trainings, replayed from CUDA graphs.
`cifar_pairs_side_by_side_4`: the same for four pairs of Co-teaching (`rank: eval_first`, all rows kept).
`cifar_narrow_convs_8`: bare steps of eight trainings, with Triton kernels for convolutions with few channels, against
the same with cuDNN's.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from our_steps import (
    ADAM,
    Bench,
    Repeated,
    cifar_bench,
    image_set,
    labelled,
    resident_batches,
    setting,
    surroundings,
)
from packed_jpegs import linked_tree, make_jpegs, packed
from record import publish, record_runs
from step_references import PlainStep, adam, network
from timing import Extent, extent, rates, synchronise

from trainer.acceleration.compile import compile_blocks
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import derive_stream
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.standard import StandardTask
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.twin import TwinModel
from trainer.training.interleave import STEPS_PER_TURN, interleave
from trainer.training.loop import TrainingJob, iterate_training

TRAININGS = 8
ROWS = 128
EPOCHS = 200
_MADE_UP = 64


def fed_in_turn(tasks: Sequence[BaseTask], batches: Sequence[Batch], device: torch.device) -> Callable[[], None]:
    """One step of each training, in its own stream."""
    steps = [Repeated(task, batches) for task in tasks]
    streams = [torch.cuda.Stream() if device.type == "cuda" else None for _ in tasks]
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
    turns = labelled(bench, batches)

    def one() -> None:
        batch, labels = next(turns)
        step(batch.images, labels)

    return one


def opened(bench: Bench, scratch: Path, samples: int) -> ImageSet:
    """Small pictures, kept decoded on the device as CIFAR's are."""
    make_jpegs(scratch / "made-up", _MADE_UP, bench.pixels)
    linked_tree(scratch / "made-up", scratch, samples)
    index = packed(scratch, os.cpu_count() or 1)
    image, execution = ImageConfig(size=bench.pixels, pad=4), ExecutionConfig(loader="resident")
    return image_set(bench, index, image, execution)


@dataclass(frozen=True)
class Side:
    """What is trained side by side."""

    name: str
    trainings: int
    networks: int
    task: Callable[[Bench, int, TaskSettings], BaseTask]
    """Called with (bench, seed, settings)."""


def fold_task(bench: Bench, seed: int, form: TaskSettings) -> BaseTask:
    return StandardTask(bench.model(seed), form)


def pair_task(bench: Bench, seed: int, form: TaskSettings) -> BaseTask:
    """All rows are kept: the step with the most work, and with the same shape in every epoch."""
    pair = TwinModel(bench.model(2 * seed), bench.model(2 * seed + 1))
    return CoteachingTask(pair, form, ForgetSchedule(ROWS, 0.0, 10), "eval_first")


FOLDS = Side("folds", 8, 1, fold_task)
PAIRS = Side("pairs", 4, 2, pair_task)


def run_of(side: Side, bench: Bench, data: ImageSet, rows: int, seed: int, root: Path) -> Generator[None, None, None]:
    """A training as a run makes it."""
    plan = StaticPlan(derive_stream(seed, "benchmark"), data.ids, rows, EPOCHS)
    task = side.task(bench, seed, setting(bench, ADAM, plan, torch.from_numpy(data.labels)))
    ctx = surroundings(root, task.world)
    return iterate_training(
        TrainingJob("standard", root / "standard"),
        task,
        lambda plans, first: data.training_batches(plan.schedule, plans, first, task.world),
        ctx,
    )


def runs_figure(side: Side, small: bool) -> dict[str, Any]:
    bench, rows, samples = cifar_bench(small), 8 if small else ROWS, 48 if small else 50_000
    count, turn = 2 if small else side.trainings, STEPS_PER_TURN
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        data = opened(bench, scratch, samples)

        def lanes(first: int, count: int) -> Generator[None, None, list[None]]:
            seeds = range(first, first + count)
            runs = [run_of(side, bench, data, rows, seed, scratch / f"run{seed}") for seed in seeds]
            return interleave(runs, bench.device)

        bare = [side.task(bench, 100 + seed, setting(bench, ADAM)) for seed in range(count)]
        with closing(lanes(0, count)) as together, closing(lanes(count, 1)) as alone:
            ways: dict[str, Callable[[], object]] = {
                "reference": fed_in_turn(bare, resident_batches(bench, rows), bench.device),
                "ours": lambda: next(together),
                "ours, one run": lambda: next(alone),
            }
            numbers = dict(zip(ways, (count * rows, count * turn * rows, turn * rows), strict=True))
            found = rates(ways, numbers, extent(small) if small else Extent(seconds=6.0))
        data.close()
    note = (
        f"{bench.said}; {count} {side.name} of the trainer's loop, batch {rows} each, Adam; {samples:,} images, "
        f"cropped and flipped, with metrics and checkpoints; networks of each: {side.networks}, images counted once; "
        f"one of ours alone: {median(found['ours, one run']):,.0f} images/s; reference: {count} trainings of bare "
        "steps replayed from CUDA graphs on resident batches, no augmentation"
    )
    figure = f"cifar_{side.name}_side_by_side_{side.trainings}"
    return record_runs(figure, found["ours"], found["reference"], unit="images/s", note=note)


def steps_figure(small: bool) -> dict[str, Any]:
    bench, rows = cifar_bench(small), 8 if small else 128
    batches = resident_batches(bench, rows)
    tasks = [fold_task(bench, seed, setting(bench, ADAM)) for seed in range(TRAININGS + 1)]
    ways = {
        "reference": one_alone(bench, batches),
        "ours": fed_in_turn(tasks[1:], batches, bench.device),
        "ours, one training": fed_in_turn(tasks[:1], batches, bench.device),
    }
    counts = dict(zip(ways, (rows, TRAININGS * rows, rows), strict=True))
    found = rates(ways, counts, extent(small))
    note = (
        f"{bench.said}; {TRAININGS} trainings, batch {rows} each, Adam; steps on resident batches, no augmentation; "
        f"one of ours alone: {median(found['ours, one training']):,.0f} images/s; reference: one training, bf16 eager"
    )
    return record_runs("cifar_side_by_side_8", found["ours"], found["reference"], unit="images/s", note=note)


def narrow_convs_figure(small: bool) -> dict[str, Any]:
    bench, rows = cifar_bench(small), 8 if small else ROWS
    batches, form = resident_batches(bench, rows), setting(bench, ADAM)
    ours = [StandardTask(bench.model(seed), form) for seed in range(TRAININGS)]
    with_cudnn = [StandardTask(bench.model(seed), replace(form, compile=False)) for seed in range(TRAININGS)]
    if bench.fast:
        for task in with_cudnn:
            compile_blocks(task.module, "inductor")
    ways = {"reference": with_cudnn, "ours": ours}
    found = rates(
        {name: fed_in_turn(tasks, batches, bench.device) for name, tasks in ways.items()},
        dict.fromkeys(ways, TRAININGS * rows),
        extent(small),
    )
    note = (
        f"{bench.said}; {TRAININGS} trainings, batch {rows} each, Adam; steps on resident batches, no augmentation; "
        "reference: the same steps, compiled with cuDNN's convolutions"
    )
    return record_runs("cifar_narrow_convs_8", found["ours"], found["reference"], unit="images/s", note=note)


FIGURES = {
    "cifar_side_by_side_8": steps_figure,
    "cifar_folds_side_by_side_8": partial(runs_figure, FOLDS),
    "cifar_pairs_side_by_side_4": partial(runs_figure, PAIRS),
    "cifar_narrow_convs_8": narrow_convs_figure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    publish([FIGURES[given.figure](given.small)])


if __name__ == "__main__":
    main()
