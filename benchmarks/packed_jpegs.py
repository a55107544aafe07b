"""Shards of any number of real JPEG files, or of synthetic ones for smoke tests."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from shards.pack import PackOptions, pack
from shards.sample_index import SampleIndex
from shards.sources import open_source


def linked_tree(images: Path, scratch: Path, samples: int) -> list[Path]:
    """The images under `samples` distinct names: root/train/<class>/<name>.jpg, by hard link."""
    found = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not found:
        raise SystemExit(f"{images} holds no .jpg or .jpeg file: name a folder of JPEG files")
    local = [scratch / f"original-{number}.jpg" for number in range(len(found))]
    for copy, original in zip(local, found, strict=True):
        copy.write_bytes(original.read_bytes())
    files = []
    for number in range(samples):
        file = scratch / "root" / "train" / f"class{number % 10}" / f"{number:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        os.link(local[number % len(local)], file)
        files.append(file)
    return files


def packed(scratch: Path, workers: int, resize: int | None = None) -> SampleIndex:
    """The tree's shards; resize: the shorter side they are stored with, None: as the files are."""
    source = open_source("image_folder", scratch / "root", "train")
    index = pack(source, scratch / "shards", PackOptions(workers=workers, resize=resize))
    assert index is not None
    return index


def make_jpegs(folder: Path, count: int, shorter_side: int) -> None:
    """Made-up pictures that compress as photographs do: clouds of several sizes, and a little noise."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        size = (shorter_side * 4 // 3, shorter_side)
        picture = random.normal(0, 7, (size[1], size[0], 3))
        for cells in (4, 16, 64):
            cloud = random.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            picture += (np.asarray(Image.fromarray(cloud).resize(size, Image.Resampling.BICUBIC)) - 128.0) / 2
        pixels = np.clip(picture + 128, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)
