"""Images packed per second, against as many processes that only decode and resize the same images.

    python benchmarks/packing.py --images FOLDER_OR_TAR --workers 2 --resize 256 --rounds 3 [--append]

This reference is strict: it writes no JPEG, hashes nothing and stores nothing. `packing_encoded` compares the same
packing with decoding, resizing and encoding JPEGs in memory.
"""

import argparse
import io
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from record import publish, record_runs

from shards.image_check import open_image
from shards.image_store import DEFAULT_QUALITY, fit_size, load_resized
from shards.pack import pack
from shards.sources import open_source

_SUFFIXES = (".jpg", ".jpeg", ".png")
_CLASSES = 20


def images_of(given: Path, place: Path) -> list[Path]:
    if given.is_dir():
        return sorted(path for path in given.rglob("*") if path.suffix.lower() in _SUFFIXES)
    with tarfile.open(given) as tar:
        tar.extractall(place, filter="data")
    return images_of(place, place)


def class_folders(images: list[Path], count: int, root: Path) -> list[str]:
    """ROOT/train/<class>/<number>: the images, repeated under new names up to `count`."""
    paths = []
    for number in range(count):
        image = images[number % len(images)]
        path = root / "train" / f"class{number % _CLASSES:02d}" / f"{number:06d}{image.suffix.lower()}"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, path)
        paths.append(str(path))
    return paths


def decode_and_resize(paths: list[str], resize: int, encode: bool) -> None:
    """The reference: a tight loop over the very calls that packing makes."""
    for path in paths:
        image = open_image(Path(path).read_bytes())
        size, box = fit_size(image.size, resize)
        pixels = load_resized(image, size, box)
        if encode:
            pixels.save(io.BytesIO(), "JPEG", quality=DEFAULT_QUALITY, subsampling="4:2:0")


def reference(paths: list[str], workers: int, resize: int, encode: bool) -> None:
    shares = [paths[worker::workers] for worker in range(workers)]
    processes = multiprocessing.get_context("forkserver")  # as packing starts its own
    processes.set_forkserver_preload(["shards.shard_writer", "webdataset"])
    with ProcessPoolExecutor(workers, processes) as pool:
        list(pool.map(decode_and_resize, shares, [resize] * workers, [encode] * workers))


def rate(job: Callable[[], object], count: int) -> float:
    """Images a second."""
    os.sync()  # what the run before left to be written is not this one's to wait for
    start = time.perf_counter()
    job()
    return count / (time.perf_counter() - start)


def measure(root: Path, paths: list[str], workers: int, resize: int, rounds: int) -> tuple[list[float], ...]:
    """Packing; decode + resize; decode + resize + encode: taken in turn."""
    packing, decoding, encoding = [], [], []
    source = open_source("image_folder", root, "train")
    for number in range(rounds):
        out = root / f"out-{number}"
        packing.append(rate(partial(pack, source, out, workers, resize=resize), len(paths)))
        decoding.append(rate(partial(reference, paths, workers, resize, encode=False), len(paths)))
        encoding.append(rate(partial(reference, paths, workers, resize, encode=True), len(paths)))
        shutil.rmtree(out)
    return packing, decoding, encoding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder or tar of JPEGs and PNGs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resize", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=4000, help="the images are repeated up to so many")
    parser.add_argument("--append", action="store_true", help="keep the lines in results/packing.jsonl")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        images = images_of(given.images, place / "unpacked")
        paths = class_folders(images, given.count, place / "root")
        packed, decoded, encoded = measure(place / "root", paths, given.workers, given.resize, given.rounds)
    command = (
        f"python benchmarks/packing.py --images {given.images.name} --workers {given.workers} "
        f"--resize {given.resize} --rounds {given.rounds} --count {given.count}"
    )
    figures = {
        "packing": (packed, decoded, "reference: decode, resize"),
        "packing_encoded": (packed, encoded, "reference: decode, resize, encode"),
    }
    lines = [
        record_runs(name, values, references, command=command, unit="images/s", note=note)
        for name, (values, references, note) in figures.items()
    ]
    publish(lines, "packing.jsonl" if given.append else None)


if __name__ == "__main__":
    main()
