"""End to end from the shards: training and prediction as in a run, against their slowest part alone.

    python benchmarks/end_to_end.py FIGURE [--images FOLDER] [--samples 10000] [--small]

FOLDER holds JPEG files (default: synthetic images that compress like photographs). They are repeated under distinct
ids and packed with a shorter side of 256, like WebVision.
`end_to_end_b256` is the trainer's own loop (metrics, counters, heartbeat) over a shuffled 40 % of them; its reference
is the same task repeating the step on one batch, between the runs. `predict_end_to_end` and
`predict_long_end_to_end` are predict passes that collect their rows; their references are the loader alone and the
forward alone. `--small`: a tiny network.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from our_steps import SGD, Bench, image_set, setting, surroundings, webvision_bench
from packed_jpegs import linked_tree, make_jpegs, packed
from record import publish, record_runs
from timing import Extent, elapsed, rates, synchronise

from trainer.acceleration.graphed_forward import clear_graph_cache
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.stop import StopRequest
from trainer.distributed.world import World
from trainer.incv.predictions import OUTPUTS as OF_PREDICTIONS
from trainer.loading.batch import Batch, Batches, BatchRequest
from trainer.loading.epoch_plan import EpochPlan, StaticPlan
from trainer.loading.image_set import ImageSet
from trainer.loading.sample_order import derive_stream
from trainer.methods.networks import list_networks
from trainer.methods.standard import StandardTask
from trainer.passes.forward import iterate_forward, on_priority_stream
from trainer.passes.outputs import OUTPUTS
from trainer.passes.sample_pass import Collector
from trainer.training.loop import TrainingJob, train

SUBSET, EPOCHS = 0.4, 1000
_MADE_UP = 64


@dataclass(frozen=True)
class Sizes:
    samples: int
    batch: int
    predict_batch: int
    stored: int
    """Shorter side of the packed images."""
    steps: int
    """Of a run."""
    lead_in: int
    """Steps before a run is timed: they use up what was read ahead while the loader had nothing else to do."""
    runs: int


LARGE = Sizes(samples=10_000, batch=256, predict_batch=512, stored=256, steps=120, lead_in=20, runs=3)
SMALL = Sizes(samples=48, batch=8, predict_batch=16, stored=40, steps=4, lead_in=1, runs=2)
ROUNDS = {"predict_end_to_end": 6, "predict_long_end_to_end": 14}
"""How often a predict pass goes over the samples: the first sees about as many as WebVision has of 50 classes, the
second is long enough to be compiled."""


class _Measured(Exception):
    """All runs are made: the loop need not go on to the end of its plan."""


def opened(bench: Bench, sizes: Sizes, images: Path | None, scratch: Path, threads: int) -> ImageSet:
    if images is None:
        images = scratch / "made-up"
        make_jpegs(images, _MADE_UP, sizes.stored * 3 // 2)
    linked_tree(images, scratch, sizes.samples)
    index = packed(scratch, os.cpu_count() or 1, sizes.stored)
    image = ImageConfig(size=bench.pixels, resize=sizes.stored, chroma="smooth")
    execution = ExecutionConfig(loader="dali" if bench.fast else "cpu", workers=threads)
    return image_set(bench, index, image, execution)


def training_figure(bench: Bench, sizes: Sizes, data: ImageSet, scratch: Path) -> dict[str, Any]:
    """A subset of whole batches: short epochs would otherwise end with far more half-empty ones than long ones do."""
    ids = np.random.default_rng(0).permutation(data.ids)[: int(SUBSET * len(data.ids)) // sizes.batch * sizes.batch]
    plan = StaticPlan(derive_stream(0, "benchmark"), np.sort(ids), sizes.batch, EPOCHS)
    task = StandardTask(bench.model(0), setting(bench, SGD, plan, torch.from_numpy(data.labels)))
    world = World(0, 1, bench.device, torch.get_num_threads())
    found: dict[str, list[float]] = {"ours": [], "reference": []}
    ctx = surroundings(scratch / "run", world)
    training = TrainingJob("standard", scratch / "run" / "standard")

    def batches_from(plans: Iterable[EpochPlan], first: int) -> Batches:
        return _timed(data.training_batches(plan.schedule, plans, first, world), task, plan, sizes, found)

    with suppress(_Measured):
        train(training, task, batches_from, ctx)
    note = (
        f"{bench.said}; {len(ids):,} of {len(data.ids):,} samples, shuffled, {sizes.steps} steps a run of the "
        "trainer's loop, no checkpoint due in them; reference: the same step, alone, on one batch again and again"
    )
    return _line("end_to_end_b256", found["ours"], found["reference"], note)


def _timed(
    batches: Batches, task: StandardTask, plan: StaticPlan, sizes: Sizes, found: dict[str, list[float]]
) -> Batches:
    """The loader's batches; the loop asks for the next one when it has done all it does in a step."""
    first = next(batches)
    resident = replace(first, **{name: getattr(first, name).clone() for name in ("ids", "images", "weights")})
    yield first
    at = next(plan.steps())
    rows = sizes.batch * sizes.steps

    def again() -> None:
        for _ in range(sizes.steps):
            task.step(resident, at)

    for run in range(sizes.runs):
        yield from islice(batches, sizes.lead_in)
        synchronise()
        began = time.perf_counter()
        yield from islice(batches, sizes.steps)
        synchronise()
        found["ours"].append(rows / (time.perf_counter() - began))
        found["reference"].append(rows / elapsed(again))
        said = ", ".join(f"{name} {values[-1]:,.0f} images/s" for name, values in found.items())
        print(f"run {run}: {said}", file=sys.stderr, flush=True)
    raise _Measured


class _Resident:
    """A loader that has one batch and gives it again and again."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def batches(self, requests: Iterable[BatchRequest]) -> Batches:
        return (self._batch for _ in requests)

    def close(self) -> None:
        pass


def predict_figure(bench: Bench, sizes: Sizes, data: ImageSet, name: str) -> dict[str, Any]:
    networks = list_networks(StandardTask(bench.model(0), setting(bench, SGD)).module)
    requests, stop = data.predict_requests(data.ids, sizes.predict_batch) * ROUNDS[name], StopRequest()
    images = len(data.ids) * ROUNDS[name]
    labels = torch.from_numpy(data.labels).to(bench.device)
    resident = _Resident(next(iter(data.loader.batches(requests[:1]))))

    def whole_pass() -> None:
        clear_graph_cache()  # most networks are asked once: they have nothing of an earlier pass
        passes = iterate_forward(networks, data.loader, requests, bench.device, "bf16", stop, "ours")
        collector = Collector([OUTPUTS[column] for column in OF_PREDICTIONS], labels)
        with on_priority_stream(bench.device):
            for request, (batch, answers) in zip(requests, passes, strict=True):
                collector.add(batch, answers, request.real_rows, images)
        ids, columns = collector.columns(bench.device)
        assert len(ids) == len(columns["losses"].cpu()) == images

    def decoding() -> None:
        for batch in data.loader.batches(requests):
            assert len(batch.images)

    def forward() -> None:
        for _ in iterate_forward(networks, resident, requests, bench.device, "bf16", stop, "forward"):
            pass

    ways = {"ours": whole_pass, "decoding": decoding, "forward": forward}
    measure = Extent(sizes.runs, 2.5 if bench.fast else 0.0, steps=1)
    found = rates(ways, dict.fromkeys(ways, images), measure)
    alone = {part: median(found[part]) for part in ("decoding", "forward")}
    slower = min(alone, key=lambda part: alone[part])
    note = (
        f"{bench.said}; {len(data.ids):,} samples {ROUNDS[name]} times in one pass, batch {sizes.predict_batch}, "
        f"recorded anew in each; reference: {slower}, the slower of "
        + " and ".join(f"{part} {rate:,.0f}" for part, rate in alone.items())
    )
    return _line(name, found["ours"], found[slower], note)


def _line(name: str, ours: list[float], reference: list[float], note: str) -> dict[str, Any]:
    if "--images" not in sys.argv:
        note += f"; {_MADE_UP} made-up JPEG files"
    return record_runs(name, ours, reference, unit="images/s", note=note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["end_to_end_b256", *ROUNDS])
    parser.add_argument("--images", type=Path)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--predict-batch", type=int)
    parser.add_argument("--threads", type=int, default=8, help="of the loader")
    parser.add_argument("--scratch", type=Path, help="where the shards are made; default: the temporary folder")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    given = parser.parse_args()
    sizes = SMALL if given.small else LARGE
    sizes = replace(
        sizes, samples=given.samples or sizes.samples, predict_batch=given.predict_batch or sizes.predict_batch
    )
    torch.backends.cudnn.benchmark = True
    bench = webvision_bench(given.small)
    with tempfile.TemporaryDirectory(dir=given.scratch) as name:
        data = opened(bench, sizes, given.images, Path(name), given.threads)
        if given.figure == "end_to_end_b256":
            line = training_figure(bench, sizes, data, Path(name))
        else:
            line = predict_figure(bench, sizes, data, given.figure)
        publish([line])
        data.close()


if __name__ == "__main__":
    main()
