"""Reads and decodes a few seconds of images from packed shards, as a run would."""

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from shards.errors import InputError
from shards.sample_index import SampleIndex
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.devices import count_visible_gpus
from trainer.doctor.finding import Finding
from trainer.doctor.storage import count_cores
from trainer.loading.image_set import choose_loader, open_image_set
from trainer.loading.sample_order import mix64

_SUBJECT = "shards"
_BATCH = 64
_MOST_IMAGES = 50_000
_SECONDS = 5.0
_LARGEST_SIDE = 224
_VERIFY = "incv shards verify {folder} names the damaged files, and incv shards repair {folder} writes them again"


def examine_shards(folder: Path, seconds: float = _SECONDS) -> Finding:
    """Load images of the whole set in random order for a few seconds; returns the rate, or what is wrong."""
    try:
        index = SampleIndex.load(folder)
        return _probe(index, folder, seconds)
    except InputError as error:
        return Finding(_SUBJECT, "problem", str(error), "pack the images again, or correct the path")
    except (OSError, RuntimeError, ValueError) as error:
        fix = _VERIFY.format(folder=folder)
        return Finding(_SUBJECT, "problem", f"{folder} cannot be loaded: {str(error).splitlines()[0]}", fix)


def _probe(index: SampleIndex, folder: Path, seconds: float) -> Finding:
    ids = index.usable_ids()
    if not len(ids):
        return Finding(_SUBJECT, "problem", f"{folder} has no usable image", "look at rejected.csv, and pack again")
    device = torch.device("cuda" if count_visible_gpus() else "cpu")
    side = int(min(_LARGEST_SIDE, np.median(np.minimum(index.width[ids], index.height[ids]))))
    image, workers = ImageConfig(size=max(side, 1)), count_cores()
    kind = choose_loader(index, ids, image, ExecutionConfig(workers=workers), device)
    loader = "dali" if kind == "dali" else "cpu"  # a resident loader would read everything first
    execution = ExecutionConfig(workers=workers, loader=loader)  # type: ignore[arg-type]
    scattered = ids[np.argsort(mix64(ids), kind="stable")][:_MOST_IMAGES]
    images = failed = 0
    with closing(open_image_set(index, ids, index.label.astype(np.int64), image, execution, device)) as image_set:
        began = time.monotonic()
        requests = image_set.predict_requests(scattered, _BATCH)
        with closing(image_set.loader.batches(requests)) as batches:
            for batch in batches:
                images += int((batch.ids >= 0).sum())
                failed += len(batch.unreadable)
                if time.monotonic() - began > seconds:
                    break
        took = time.monotonic() - began
    words = (
        f"{folder}: {len(ids):,} images; {images / took:,.0f} images/s read in random order and decoded to "
        f"{image.size} x {image.size} ({loader} loader, {workers} threads, on {device.type})"
    )
    if failed:
        return Finding(
            _SUBJECT, "problem", f"{words}; {failed:,} of {images:,} are damaged", _VERIFY.format(folder=folder)
        )
    return Finding(_SUBJECT, "ok", words)
