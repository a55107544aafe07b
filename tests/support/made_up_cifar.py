"""Made-up files in CIFAR-10's binary format, of which the first rows are packed where the recipes look for them."""

import os
from pathlib import Path

import numpy as np

from shards.pack import pack
from shards.sources import open_source
from tests.support.pictures import FirstRows

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FILE_ROWS, _PIXELS = 10_000, 3 * 32 * 32


def write_cifar(root: Path, images: int = 200) -> Path:
    """Write the official files, each beginning with `images` images of random colours by class; returns `root`."""
    root.mkdir(parents=True)
    (root / "batches.meta.txt").write_text("\n".join(NAMES) + "\n")
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (10, _PIXELS))
    records = np.zeros((_FILE_ROWS, 1 + _PIXELS), np.uint8)
    records[:, 0] = np.arange(_FILE_ROWS) % 10
    noise = rng.integers(-40, 40, (images, _PIXELS))
    records[:images, 1:] = np.clip(colours[records[:images, 0]] + noise, 0, 255)
    records.tofile(root / "test_batch.bin")
    for number in range(1, 6):
        os.link(root / "test_batch.bin", root / f"data_batch_{number}.bin")
    return root


def pack_cifar(folder: Path, images: int = 60) -> Path:
    """Pack the first images of made-up files below `folder`, where the CIFAR-10 recipes expect them; returns it."""
    root = write_cifar(folder / "data" / "cifar10")
    for split in ("train", "test", "fit", "validation"):
        pack(FirstRows(open_source("cifar10", root, split), images), folder / "data" / "shards" / f"cifar10-{split}")
    return folder
