"""Thumbnails as WebP: small images without loss, photographs scaled down; many of them within a limit of bytes."""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from shards.errors import InputError
from shards.image_check import UndecodableImage
from trainer.loading.shard_reader import CorruptSample

ImageOf = Callable[[int], Image.Image]
"""Returns the image of a sample_id."""

SMALL = 64  # pixels; images up to this size are not scaled, and shown pixelated
_PREFIX = "data:image/webp;base64,"
_TRIED = 32  # images that are encoded at every size before one is chosen
_THREADS = 4
_AT_ONCE = 64
_UNREADABLE = (OSError, ValueError, KeyError, IndexError, InputError, UndecodableImage, CorruptSample)


@dataclass(frozen=True)
class Encoding:
    """How thumbnails are stored."""

    size: int
    """Longest side in pixels of a photograph."""
    exact: bool
    """Whether small images are stored without loss."""


ENCODINGS = tuple(Encoding(size, size >= 112) for size in (176, 144, 128, 112, 96, 80, 64, 48))
"""From the largest files to the smallest."""


@dataclass(frozen=True)
class Picture:
    """A thumbnail."""

    data: bytes
    pixelated: bool
    """Whether the image is so small that its pixels should be visible."""

    @property
    def base64(self) -> str:
        return base64.b64encode(self.data).decode()

    @property
    def uri(self) -> str:
        return _PREFIX + self.base64


def read_image(sample_id: int, image_of: ImageOf) -> Image.Image | None:
    """Return the image in RGB; None if it cannot be read: a thumbnail is optional."""
    try:
        return image_of(sample_id).convert("RGB")
    except _UNREADABLE:
        return None


def encode_picture(image: Image.Image, encoding: Encoding = ENCODINGS[0]) -> Picture:
    """Encode an RGB image."""
    stream, pixelated = io.BytesIO(), max(image.size) <= SMALL
    if pixelated and encoding.exact:
        image.save(stream, "WEBP", lossless=True, quality=40)
    else:
        scaled = image.copy()
        scaled.thumbnail((encoding.size, encoding.size))
        scaled.save(stream, "WEBP", quality=62, method=3)
    return Picture(stream.getvalue(), pixelated)


def encode_pictures(ids: Sequence[int], image_of: ImageOf, most_characters: int) -> dict[int, Picture]:
    """Return thumbnails by sample_id, as large as the limit allows; without images that cannot be read.

    most_characters: limit on the base64 text of all thumbnails. Those at the end of `ids` are left out if even the
    smallest are too many.
    """
    encoding = choose_encoding(ids, image_of, most_characters)

    def make(sample_id: int) -> Picture | None:
        image = read_image(sample_id, image_of)
        return None if image is None else encode_picture(image, encoding)

    found: dict[int, Picture] = {}
    used = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for first in range(0, len(ids), _AT_ONCE):  # in parts, so that few images are in memory
            part = ids[first : first + _AT_ONCE]
            for sample_id, picture in zip(part, pool.map(make, part), strict=True):
                if picture is None:
                    continue
                used += _characters(picture)
                if used > most_characters:
                    return found
                found[sample_id] = picture
    return found


def choose_encoding(ids: Sequence[int], image_of: ImageOf, most_characters: int) -> Encoding:
    """Return the best encoding with which the thumbnails of `ids` fit, judged by some of them."""
    tried = ids[:: max(len(ids) // _TRIED, 1)]
    images = [image for sample_id in tried if (image := read_image(sample_id, image_of)) is not None]
    for encoding in ENCODINGS[:-1]:
        mean = sum(_characters(encode_picture(image, encoding)) for image in images) / max(len(images), 1)
        if mean * len(ids) <= 0.95 * most_characters:
            return encoding
    return ENCODINGS[-1]


def _characters(picture: Picture) -> int:
    return -(-len(picture.data) // 3) * 4


def thumbnails(suspects: Iterable[dict[str, Any]], image_of: ImageOf | None) -> dict[int, dict[str, Any]]:
    """Return sample_id -> {"uri": data URI, "pixelated": bool}, without samples whose image cannot be read."""
    found: dict[int, dict[str, Any]] = {}
    if image_of is None:
        return found
    for suspect in suspects:
        if (image := read_image(suspect["sample_id"], image_of)) is not None:
            picture = encode_picture(image)
            found[suspect["sample_id"]] = {"uri": picture.uri, "pixelated": picture.pixelated}
    return found
