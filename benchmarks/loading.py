"""Our loaders against PyTorch's DataLoader and plain DALI, on real JPEGs, in one run.

    python benchmarks/loading.py cpu --images FOLDER [--threads 2] [--rounds 5] [--append]
    python benchmarks/loading.py gpu --images FOLDER [--threads 8] [--samples 50000] [--rounds 5] [--append]

FOLDER holds JPEG files, repeated under distinct ids up to --samples. `cpu` decodes on the CPU: our CPU loader, and
DALI without a GPU. `gpu` loads a random 30 % of the samples in shuffled order. Each run is three consecutive epochs.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from loading_references import RESIZE, SIZE, Pass, dali_webdataset, plain_dali, torchvision_loader
from packed_jpegs import linked_tree, packed
from record import publish, record_runs

from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry
from trainer.loading.batch import Loader
from trainer.loading.cpu_loader import CpuLoader
from trainer.loading.dali_loader import DaliLoader
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.pixels import Normalise
from trainer.loading.requests import training_requests
from trainer.loading.sample_order import Ids, derive_stream

GEOMETRY = Geometry(SIZE, RESIZE, 0, True, "zero")
SUBSET, EPOCHS = 0.3, 3


def main() -> None:
    arguments = _parsed()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        files = linked_tree(arguments.images, Path(scratch), arguments.samples)
        index = packed(Path(scratch), arguments.threads)
        measure = _cpu if arguments.where == "cpu" else _gpu
        publish(measure(files, index, arguments), "loading.jsonl" if arguments.append else None)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["cpu", "gpu"])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where the shards are made; default: the temporary folder")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/loading.jsonl")
    given = parser.parse_args()
    on_gpu = given.where == "gpu"
    given.threads = given.threads or (8 if on_gpu else 2)
    given.samples = given.samples or (50_000 if on_gpu else 698)
    given.batch = given.batch or (256 if on_gpu else 64)
    return given


def _ours(loader: Loader, index: SampleIndex, ids: Ids, batch: int) -> Pass:
    """Training batches of `ids`, the ends of epochs inside; every pass is another training."""
    passes = itertools.count()

    def training() -> Iterator[int]:
        plan = StaticPlan(derive_stream(next(passes), "benchmark"), ids, batch, EPOCHS)
        requests = training_requests(plan.schedule, plan.plans(), index, GEOMETRY)
        for step, given in zip(plan.steps(), loader.batches(requests), strict=True):
            assert len(given.images)
            yield len(step.selected)

    return training


def _rates(candidates: dict[str, tuple[Pass, int]], rounds: int) -> dict[str, list[float]]:
    """images/s of each candidate (a pass, and how many passes make EPOCHS epochs), interleaved.

    The first round warms up and is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name, (one_pass, passes) in candidates.items():
            began = time.perf_counter()
            count = sum(sum(one_pass()) for _ in range(passes))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            rate = count / (time.perf_counter() - began)
            if number:
                rates[name].append(rate)
            print(f"round {number}: {name or 'ours'} {rate:,.0f} images/s", file=sys.stderr, flush=True)
    return rates


def _cpu(files: list[Path], index: SampleIndex, arguments: argparse.Namespace) -> list[dict[str, object]]:
    device, threads, batch = torch.device("cpu"), arguments.threads, arguments.batch
    torch.set_num_threads(threads)
    normalise, ids = Normalise((0.5,) * 3, (0.5,) * 3, device), index.usable_ids()
    cpu = CpuLoader(index, GEOMETRY, normalise, device, threads)
    dali = DaliLoader(index, GEOMETRY, normalise, device, threads, scales=True)
    candidates = {
        "cpu_loader": (_ours(cpu, index, ids, batch), 1),
        "dali_loader": (_ours(dali, index, ids, batch), 1),
        "torchvision": (torchvision_loader(files, batch, threads), EPOCHS),
        "plain_dali": (plain_dali(files, batch, threads, gpu=False), EPOCHS),
    }
    rates = _rates(candidates, arguments.rounds)
    best = max(("torchvision", "plain_dali"), key=lambda name: np.median(rates[name]))
    return [
        record_runs(f"loading_cpu_{name}", rates[name], rates[best], unit="images/s", note=f"reference: {best}")
        for name in candidates
    ]


def _gpu(files: list[Path], index: SampleIndex, arguments: argparse.Namespace) -> list[dict[str, object]]:
    device, threads, batch = torch.device("cuda", 0), arguments.threads, arguments.batch
    chosen = np.sort(np.random.default_rng(0).permutation(index.usable_ids())[: int(SUBSET * len(index))])
    normalise = Normalise((0.5,) * 3, (0.5,) * 3, device, torch.bfloat16)
    paths = [files[number] for number in chosen]

    def ours(smooth: bool) -> tuple[Pass, int]:
        loader = DaliLoader(index, replace(GEOMETRY, smooth_chroma=smooth), normalise, device, threads, scales=True)
        return _ours(loader, index, chosen, batch), 1

    candidates = {
        "": ours(smooth=False),
        "plain_dali": (plain_dali(paths, batch, threads, gpu=True), EPOCHS),
        "_dali_webdataset": (dali_webdataset(*_filtered(index, chosen), batch, threads, gpu=True), EPOCHS),
        "_smooth": ours(smooth=True),
        "plain_dali_smooth": (plain_dali(paths, batch, threads, gpu=True, smooth=True), EPOCHS),
    }
    rates = _rates(candidates, arguments.rounds)
    subset = f"{len(chosen):,} of {len(index):,} samples, {EPOCHS} epochs in one go"
    said = {
        "": ("plain_dali", f"{subset}, image.chroma: fast; reference: fn.readers.file"),
        "_dali_webdataset": ("plain_dali", f"{subset}, by filtered index files, shuffled over 4,096"),
        "_smooth": ("plain_dali_smooth", f"{subset}, image.chroma: smooth; reference: fn.readers.file, the same"),
    }
    return [
        record_runs(f"loading_gpu{name}", rates[name], rates[reference], unit="images/s", note=note)
        for name, (reference, note) in said.items()
    ]


def _filtered(index: SampleIndex, chosen: Ids) -> tuple[list[Path], list[Path]]:
    """The tars that hold a chosen sample, and index files that name the chosen ones only."""
    tars, indices = [], []
    for shard in np.unique(index.shard[chosen]):
        ids = chosen[index.shard[chosen] == shard]
        lines = [f"jpg {index.offset[one]} {index.nbytes[one]} {one:09d}.jpg" for one in ids]
        path = index.folder / f"filtered-{shard:06d}.idx"
        path.write_text("\n".join([f"v1.2 {len(ids)}", *lines]) + "\n")
        tars.append(index.shard_path(int(shard)))
        indices.append(path)
    return tars, indices


if __name__ == "__main__":
    main()
