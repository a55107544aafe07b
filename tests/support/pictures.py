"""Small images and sources for the tests of `shards`."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from shards.sources import RawSample


def picture(seed: int = 0, width: int = 20, height: int = 14, kind: str = "PNG", **options: object) -> bytes:
    """A random image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), kind, **options)


def smooth(width: int, height: int) -> Image.Image:
    """A picture without fine detail, so that JPEG and resizing change it little."""
    across, down = np.linspace(0, 1, width)[None, :], np.linspace(0, 1, height)[:, None]
    channels = [across + 0 * down, 0 * across + down, (across + down) / 2]
    return Image.fromarray((40 + 170 * np.stack(channels, axis=2)).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def image_tree(root: Path, classes: int = 3, per_class: int = 7) -> Path:
    """ROOT/train/class<i>/<j>.png or .jpg"""
    for label in range(classes):
        folder = root / "train" / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(per_class):
            kind, suffix = ("PNG", "png") if number % 2 else ("JPEG", "jpg")
            data = picture(label * per_class + number, width=16 + number, kind=kind)
            (folder / f"{number}.{suffix}").write_bytes(data)
    return root


class ListSource:
    """A source over a list of (key, label, bytes)."""

    name, split, subset, class_names = "list", "train", "", ("a", "b")

    def __init__(self, rows: list[tuple[str, int, bytes]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def key(self, row: int) -> str:
        return self.rows[row][0]

    def label(self, row: int) -> int:
        return self.rows[row][1]

    def origin(self, row: int) -> str:
        return f"the list, entry {row}"

    def sample(self, row: int) -> RawSample:
        key, label, data = self.rows[row]
        return RawSample(key, label, "png", data)


class FirstRows:
    """The first rows of a large source."""

    def __init__(self, source, count: int) -> None:
        self.source, self.count = source, count
        self.name, self.split, self.class_names = source.name, source.split, source.class_names
        self.subset, self.origin = source.subset, source.origin
        self.key, self.label, self.sample = source.key, source.label, source.sample

    def __len__(self) -> int:
        return self.count


def list_source(count: int = 10) -> ListSource:
    return ListSource([(f"k{row}", row % 2, picture(row)) for row in range(count)])


def contents(folder: Path) -> dict[str, bytes]:
    """Every packed file with its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".verified.json"}
