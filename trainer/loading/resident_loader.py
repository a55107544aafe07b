"""Decode a small set of equal-sized images once, keep them on the device as uint8, and augment them there."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shards.image_check import UndecodableImage
from shards.sample_index import SampleIndex
from trainer.loading.augment import Draws, Geometry, join_draws
from trainer.loading.batch import Batch, Batches, BatchRequest, assemble_batches
from trainer.loading.pixels import Normalise, augment_and_normalise, decode
from trainer.loading.prefetch import make_batches
from trainer.loading.sample_order import Ids
from trainer.loading.shard_reader import ShardReader
from trainer.loading.transfer import copy_to_device

MAX_RESIDENT_BYTES = 2 * 1024**3
_BYTES_AT_ONCE = 32 * 1024**2
"""Size of the images that a GPU crops at once: the crops of one small batch take less time than their launches."""


def can_be_resident(index: SampleIndex, ids: Ids, geometry: Geometry) -> bool:
    """Whether the images have equal sizes, need no scaling and fit into MAX_RESIDENT_BYTES."""
    if len(ids) == 0:
        return False
    widths, heights = index.width[ids], index.height[ids]
    same = bool((widths == widths[0]).all() and (heights == heights[0]).all())
    room = min(int(widths[0]), int(heights[0]))
    unscaled = geometry.resize is None and geometry.random_resized_crop is None and geometry.size <= room
    return same and unscaled and len(ids) * int(widths[0]) * int(heights[0]) * 3 <= MAX_RESIDENT_BYTES


@dataclass(frozen=True, eq=False)
class _DecodedImages:
    """All decoded images, on the device."""

    pixels: torch.Tensor
    """uint8 [n, height, width, 3]"""
    failed: npt.NDArray[np.bool_]
    """[n]: rows that could not be decoded."""


_SHARED: "WeakValueDictionary[tuple[str, bytes, torch.device], _DecodedImages]" = WeakValueDictionary()
"""Decoded images that concurrent runs share."""


def _load_shared(index: SampleIndex, ids: Ids, device: torch.device) -> _DecodedImages:
    key = index.checksum, hashlib.sha256(ids.tobytes()).digest(), device
    images = _SHARED.get(key)
    if images is None:
        images = _SHARED[key] = _decode(index, ids, device)
    return images


def _decode(index: SampleIndex, ids: Ids, device: torch.device) -> _DecodedImages:
    height, width = int(index.height[ids[0]]), int(index.width[ids[0]])
    pixels, failed = np.zeros((len(ids), height, width, 3), np.uint8), np.zeros(len(ids), bool)
    reader = ShardReader(index)
    for row, sample_id in enumerate(ids):
        try:
            pixels[row] = decode(reader.read_or_none(int(sample_id)) or b"")
        except UndecodableImage:
            failed[row] = True
    reader.close()
    return _DecodedImages(torch.from_numpy(pixels).to(device), failed)


class ResidentLoader:
    """Makes batches from images kept on the device; the batches are bitwise equal to those of CpuLoader."""

    def __init__(
        self,
        index: SampleIndex,
        ids: Ids,
        geometry: Geometry,
        normalise: Normalise,
        device: torch.device,
        bytes_at_once: int | None = None,
    ) -> None:
        """bytes_at_once: size of the images that are cropped at once; None: that which suits the device."""
        self._geometry, self._normalise, self._device = geometry, normalise, device
        if bytes_at_once is None:
            bytes_at_once = _BYTES_AT_ONCE if device.type == "cuda" else 0
        self._rows_at_once = bytes_at_once // (geometry.size**2 * 3 * normalise.dtype.itemsize)
        self._row_of = np.full(len(index), -1, np.int64)
        self._row_of[ids] = np.arange(len(ids))
        self._images: _DecodedImages | None = _load_shared(index, ids, device)

    def batches(self, requests: Iterable[BatchRequest]) -> Batches:
        return make_batches(self._make_batches, self._group(requests), self._device)

    def _group(self, requests: Iterable[BatchRequest]) -> Iterator[list[BatchRequest]]:
        """Yield groups of consecutive requests whose batches are made at once."""
        for (rows, _, _), alike in groupby(
            requests, lambda each: (each.rows, each.fill_with_images, each.mix is None)
        ):
            most = max(1, self._rows_at_once // rows)
            while group := list(islice(alike, most)):
                yield group

    def _make_batches(self, requests: Sequence[BatchRequest]) -> list[Batch]:
        stored = self._row_of[np.concatenate([request.ids for request in requests])]
        draws = join_draws([request.draws for request in requests])

        def show(rows: Ids) -> torch.Tensor:
            shown = draws[rows]
            return augment_and_normalise(self._crop(stored[rows], shown), shown, self._normalise)

        assert self._images is not None
        return assemble_batches(requests, np.flatnonzero(self._images.failed[stored]), show, self._device)

    def _crop(self, stored: Ids, draws: Draws) -> torch.Tensor:
        size, pad = self._geometry.size, self._geometry.pad
        corners = draws.boxes[:, :2].T.astype(np.int64) + pad
        source, left, top, flipped = copy_to_device(self._device, stored, *corners, draws.flips)
        assert self._images is not None
        images = self._images.pixels[source]
        if pad:
            images = self._pad(images, pad)
        offsets = torch.arange(size, device=self._device)
        rows = top[:, None] + offsets
        columns = left[:, None] + torch.where(flipped[:, None], size - 1 - offsets, offsets)
        sample = torch.arange(len(images), device=self._device)[:, None, None]
        return images[sample, rows[:, :, None], columns[:, None, :]]

    def _pad(self, images: torch.Tensor, pad: int) -> torch.Tensor:
        padding = (pad, pad, pad, pad)
        planes = images.permute(0, 3, 1, 2)
        if self._geometry.fill == "edge":
            planes = F.pad(planes.float(), padding, mode="replicate").to(torch.uint8)
        else:
            planes = F.pad(planes, padding)
        return planes.permute(0, 2, 3, 1)

    def close(self) -> None:
        self._images = None
