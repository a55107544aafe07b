"""Duplicates and images that do not belong, found among real photos with the features of a real network.

.venv/bin/python benchmarks/near_duplicates.py --images PHOTOS --root CIFAR10 --weights FILE --keep

PHOTOS has ImageNet photos (*.JPEG), CIFAR10 the official binary files (data_batch_*.bin), FILE the weights of timm's
tf_efficientnet_lite0 in safetensors. The set: 2,500 photos and images of CIFAR-10; 125 copies of each change and 100
mirror images; and images that belong to no class: noise, blank, and the photos themselves beside CIFAR-10.
"""

import argparse
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image, ImageEnhance
from record import publish, record
from safetensors.torch import load_file

from trainer.examine.duplicates import ImagePairs, find_near_duplicates
from trainer.examine.off_topic import find_off_topic

PIXELS = 128
ORIGINALS = 2500
COPIES = {"crop": 125, "jpeg": 125, "brightness": 125, "resize": 125, "flip": 100}
STRAYS = 60


def crop(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """A window of 0.8 of the width and height."""
    width, height = (round(0.8 * side) for side in image.size)
    left, top = (
        int(random.integers(0, 1 + side - kept)) for side, kept in zip(image.size, (width, height), strict=True)
    )
    return image.crop((left, top, left + width, top + height))


def compress(image: Image.Image, random: np.random.Generator) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def brighten(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(float(random.choice([0.6, 1.4])))


def resize(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Half or twice the size."""
    factor = float(random.choice([0.5, 2.0]))
    return image.resize([max(8, round(factor * side)) for side in image.size], Image.Resampling.BILINEAR)


def flip(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


CHANGES: dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]] = {
    "crop": crop,
    "jpeg": compress,
    "brightness": brighten,
    "resize": resize,
    "flip": flip,
}


def read_cifar(folder: Path, count: int, random: np.random.Generator) -> tuple[list[Image.Image], np.ndarray]:
    """Images drawn from the training set, and their labels."""
    files = [np.fromfile(file, np.uint8).reshape(-1, 3073) for file in sorted(folder.glob("data_batch_*.bin"))]
    rows = np.concatenate(files)
    rows = rows[np.sort(random.choice(len(rows), count, replace=False))]
    return [Image.fromarray(row[1:].reshape(3, 32, 32).transpose(1, 2, 0)) for row in rows], rows[:, 0].astype(int)


def read_photos(folder: Path) -> list[Image.Image]:
    photos = []
    for file in sorted(folder.glob("*.JPEG")):
        photo = Image.open(file).convert("RGB")
        photo.thumbnail((320, 320))
        photos.append(photo)
    return photos


def make_strays(random: np.random.Generator) -> tuple[list[Image.Image], list[Image.Image]]:
    """Images of noise, and of one colour with a little noise."""
    size = (STRAYS, 96, 96, 3)
    noise = random.integers(0, 256, size)
    blank = (random.integers(0, 256, (STRAYS, 1, 1, 3)) + random.normal(0, 2, size)).clip(0, 255)
    return [Image.fromarray(one.astype(np.uint8)) for one in noise], [
        Image.fromarray(one.astype(np.uint8)) for one in blank
    ]


def scale(images: Sequence[Image.Image], pixels: int, method: Image.Resampling) -> torch.Tensor:
    """uint8 [images, 3, pixels, pixels]"""
    return torch.from_numpy(
        np.stack([np.asarray(image.convert("RGB").resize((pixels, pixels), method)) for image in images])
    ).permute(0, 3, 1, 2)


@torch.inference_mode()
def compute_features(images: Sequence[Image.Image], weights: Path) -> torch.Tensor:
    """float32 [images, 1280]"""
    network = timm.create_model("tf_efficientnet_lite0")
    network.load_state_dict(load_file(weights))
    network.reset_classifier(0)
    network.eval().to(memory_format=torch.channels_last)
    pixels = scale(images, PIXELS, Image.Resampling.BILINEAR)
    return torch.cat(
        [
            network((part.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last))
            for part in pixels.split(64)
        ]
    )


def judge(found: ImagePairs, originals: np.ndarray, kinds: np.ndarray) -> tuple[dict[str, float], float, list]:
    """Return the recall of each change, the precision, and the pairs that were not made.

    originals: the image that each was made of, itself if it was not.
    """
    pairs = {tuple(pair) for pair in found.pairs.tolist()}
    recall = {
        change: float(np.mean([(originals[one], one) in pairs for one in np.flatnonzero(kinds == change)]))
        for change in COPIES
    }
    others = [pair for pair in found.pairs.tolist() if originals[pair[0]] != originals[pair[1]]]
    return recall, 1 - len(others) / max(1, len(found.pairs)), others


def area_under_roc(scores: np.ndarray, positive: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    return float((ranks[positive].mean() - (positive.sum() + 1) / 2) / (~positive).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--images", "--root", "--weights"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--keep", action="store_true", help="append the lines to results/near_duplicates.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="draws the images and their changes")
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    photos = read_photos(options.images)
    cifar, labels = read_cifar(options.root, ORIGINALS - len(photos), random)
    images, kinds, originals = (
        [*photos, *cifar],
        ["photo"] * len(photos) + ["cifar"] * len(cifar),
        list(range(ORIGINALS)),
    )
    drawn = iter(random.permutation(ORIGINALS).tolist())
    for change, count in COPIES.items():
        for _ in range(count):
            originals.append(next(drawn))
            images.append(CHANGES[change](images[originals[-1]], random))
            kinds.append(change)
    for kind, strays in zip(("noise", "blank"), make_strays(random), strict=True):
        images += strays
        kinds += [kind] * len(strays)
    kind_of, originals_of = np.array(kinds), np.array(originals + list(range(len(originals), len(images))))
    features = compute_features(images, options.weights)
    thumbnails = scale(images, 32, Image.Resampling.BOX)

    start = time.process_time()
    pairs = find_near_duplicates(features, thumbnails)
    seconds = time.process_time() - start
    recall, precision, others = judge(pairs, originals_of, kind_of)
    note = f"{len(images)} images; {pairs.why}"
    lines = [record(f"recall_{change}", value, runs=1, spread=0.0, note=note) for change, value in recall.items()]
    made = float(np.mean([recall[change] for change in COPIES if change != "flip"]))
    lines += [
        record("recall", made, runs=1, spread=0.0, note=f"500 copies without the mirror images; {note}"),
        record("precision", precision, runs=1, spread=0.0, note=f"of {len(pairs.pairs)} pairs, not made: {others}"),
        record(
            "near_duplicates_cpu_s", seconds, runs=1, spread=0.0, unit="s", note=f"{torch.get_num_threads()} threads"
        ),
    ]
    for kind in ("noise", "blank", "photo"):
        members = np.r_[np.flatnonzero(kind_of == "cifar"), np.flatnonzero(kind_of == kind)[:100]]
        stray = kind_of[members] == kind
        given = np.r_[labels, random.integers(0, 10, stray.sum())]
        found = find_off_topic(features[members], given)
        note = f"{stray.sum()} with random labels among {len(labels)} of CIFAR-10; {found.why}: "
        note += f"{found.found[stray].mean():.3f} of them and {found.found[~stray].mean():.3f} of the others"
        lines.append(
            record(f"off_topic_auroc_{kind}", area_under_roc(found.scores, stray), runs=1, spread=0.0, note=note)
        )
    publish(lines, "near_duplicates.jsonl" if options.keep else None)


if __name__ == "__main__":
    main()
