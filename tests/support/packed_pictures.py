"""Small packed splits, and damage done to them after packing."""

import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from shards.pack import PackOptions, pack
from shards.sample_index import SampleIndex
from shards.sources.source import RawSample


@dataclass(frozen=True)
class Pictures:
    """A source over images in memory."""

    samples: tuple[RawSample, ...]
    class_names: tuple[str, ...]
    name: str = "pictures"
    split: str = "train"
    subset: str = ""

    def __len__(self) -> int:
        return len(self.samples)

    def key(self, row: int) -> str:
        return self.samples[row].key

    def label(self, row: int) -> int:
        return self.samples[row].label

    def origin(self, row: int) -> str:
        return f"picture {row}"

    def sample(self, row: int) -> RawSample:
        return self.samples[row]


def noise(row: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format=kind)
    return stream.getvalue()


def equal_pictures(count: int, width: int, height: int, classes: int) -> Pictures:
    samples = [
        RawSample(f"k{row}", row % classes, "png", encoded(noise(row, width, height), "PNG")) for row in range(count)
    ]
    return Pictures(tuple(samples), tuple(f"c{label}" for label in range(classes)))


def mixed_pictures(count: int) -> Pictures:
    """JPEG and PNG, wide and tall, larger and smaller than the input they are used for."""
    samples = []
    for row in range(count):
        kind, suffix = (("JPEG", "jpg"), ("PNG", "png"))[row % 2]
        pixels = noise(row, 9 + 5 * (row % 7), 11 + 4 * (row % 5))
        samples.append(RawSample(f"k{row}", row % 2, suffix, encoded(pixels, kind)))
    return Pictures(tuple(samples), ("even", "odd"))


def packed(source: Pictures, folder: Path, samples_per_shard: int = 10) -> SampleIndex:
    return pack(source, folder, PackOptions(workers=1, samples_per_shard=samples_per_shard))


def with_damage(index: SampleIndex, folder: Path, ids: list[int], at: float = 0.5) -> SampleIndex:
    """A copy of the split in which four bytes of these samples have changed since packing, `at` of their length."""
    shutil.copytree(index.folder, folder)
    damaged = SampleIndex.load(folder)
    for sample in ids:
        with damaged.shard_path(int(damaged.shard[sample])).open("r+b") as file:
            place = int(damaged.offset[sample] + int(damaged.nbytes[sample] * at))
            file.seek(place)
            changed = bytes(byte ^ 0x55 for byte in file.read(4))
            file.seek(place)
            file.write(changed)
    return damaged
