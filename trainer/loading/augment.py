"""What each row shows of its image: crop, flip, holes and operations, drawn as arrays; and the operations' pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.config.augmentation import Operation, RandomResizedCropConfig
from trainer.loading.augmentations import Augmentations
from trainer.loading.epoch_plan import LOOKS
from trainer.loading.sample_order import Ids, Views, draw_uniforms
from trainer.loading.transfer import copy_to_device

_CROP_ATTEMPTS = 10  # as in torchvision
_CENTRE = 0.5  # the draw that centres a crop


@dataclass(frozen=True)
class Geometry:
    """How a stored image is cropped, scaled and flipped into the network's input."""

    size: int
    """Side of the network's square input, in pixels."""
    resize: int | None
    """Crop as if the shorter side had first been resized to this many pixels; None: crop without scaling."""
    pad: int
    """Padding around the image, in pixels, that a training crop may include."""
    flip: bool
    fill: str
    """Content of the padding: `zero` or `edge`."""
    smooth_chroma: bool = True
    """Whether GPU decoders upsample chroma as CPU decoders do."""
    random_resized_crop: RandomResizedCropConfig | None = None
    """Training crops of random area and aspect ratio; None: squares of one size."""
    cutout: int = 0
    """Side of the square that is blanked out in each training image; 0: none."""

    def side(self, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32], pad: int) -> npt.NDArray[np.int64]:
        """Return the side of each square crop box in stored pixels: int64 [n]. Crops are later scaled to `size`.

        pad: padding around the image that the box may include, in pixels.
        """
        shorter = np.minimum(widths, heights).astype(np.int64)
        if self.resize is None:
            return np.minimum(self.size, shorter + 2 * pad)
        return np.clip(np.rint(self.size * shorter / self.resize).astype(np.int64), 1, shorter)


@dataclass(frozen=True, eq=False)
class Draws:
    """What n rows show of their images. `draws[rows]` are those of some rows."""

    boxes: npt.NDArray[np.int32]
    """[n, 4]: left, top, width, height in pixels of the stored image; a box may extend into the padding."""
    flips: npt.NDArray[np.bool_]
    """[n]: flip horizontally after the crop."""
    holes: npt.NDArray[np.int32] | None = None
    """[n, 4]: left, top, right and bottom of the square to blank out in each crop; None without cutout."""
    operations: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty((0, 0), np.int8))
    """[n, k]: positions in `table`, in the order in which they are applied; -1: none. [0, 0] if no row has any."""
    strengths: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """[n, k]"""
    table: dict[str, Operation] = field(default_factory=dict)
    """The operations by name; the same object in all draws of a run."""

    def __len__(self) -> int:
        return len(self.flips)

    def __getitem__(self, rows: slice | npt.NDArray[np.int64]) -> "Draws":
        holes = None if self.holes is None else self.holes[rows]
        if not self.operations.size:
            return Draws(self.boxes[rows], self.flips[rows], holes)
        return Draws(
            self.boxes[rows], self.flips[rows], holes, self.operations[rows], self.strengths[rows], self.table
        )

    def names(self) -> list[list[list[Any]]]:
        """The name and the strength of each operation of each row, for a log."""
        names = list(self.table)
        return [
            [[names[code], strength] for code, strength in zip(codes, strengths, strict=True) if code >= 0]
            for codes, strengths in zip(self.operations.tolist(), self.strengths.tolist(), strict=True)
        ]


def join_draws(draws: Sequence[Draws]) -> Draws:
    """Join draws of one kind: all with holes, or none; all with as many operations."""

    def join(name: str) -> npt.NDArray[Any]:
        return np.concatenate([attrgetter(name)(each) for each in draws])

    first = draws[0]
    holes = None if first.holes is None else join("holes")
    if not first.operations.size:
        return Draws(join("boxes"), join("flips"), holes)
    return Draws(join("boxes"), join("flips"), holes, join("operations"), join("strengths"), first.table)


def draw_rows(
    geometry: Geometry,
    augmentations: Augmentations,
    stream: int,
    epoch: int,
    ids: Ids,
    views: Views,
    widths: npt.NDArray[np.int32],
    heights: npt.NDArray[np.int32],
    looks: npt.NDArray[np.int8] | None = None,
) -> Draws:
    """Draw all that the rows show of their images in this epoch. looks: [n], index into LOOKS; None: `train`."""
    boxes, flips = training_boxes(geometry, stream, epoch, ids, widths, heights, views)
    holes = draw_holes(geometry, stream, epoch, ids, views)
    operations, strengths = augmentations.draw(stream, epoch, ids, views)
    if looks is not None:
        centred = np.flatnonzero(looks == LOOKS.index("centre"))
        boxes[centred] = centre_boxes(geometry, widths[centred], heights[centred])
        flips[centred] = False
        operations[looks > 0] = -1
        if holes is not None:
            holes[looks > 0] = 0
    return Draws(boxes, flips, holes, operations, strengths, augmentations.table)


def centre_draws(geometry: Geometry, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32]) -> Draws:
    """Return what predict passes show: the centre crops alone."""
    return Draws(centre_boxes(geometry, widths, heights), np.zeros(len(widths), bool))


def apply(images: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Apply each row's operations, one column of the draws after the other: uint8 [n, 3, h, w] to uint8.

    Each operation runs once a column, on its rows alone. The host knows which rows these are, so it never waits for
    the device.
    """
    if not draws.operations.size:
        return images
    columns = draws.operations.shape[1]
    sorted_rows = np.argsort(draws.operations.T, axis=1, kind="stable")  # [k, n]
    places = np.argsort(sorted_rows, axis=1)
    moves = [sorted_rows[0], *(places[at - 1][sorted_rows[at]] for at in range(1, columns)), places[-1]]
    strengths = np.take_along_axis(draws.strengths.T, sorted_rows, axis=1)
    gathers, values = copy_to_device(images.device, np.stack(moves), strengths)
    functions = list(draws.table.values())
    for at in range(columns):
        images = images[gathers[at]]
        images = _apply_column(images, draws.operations[sorted_rows[at], at], values[at], functions)
    return images[gathers[-1]]


def _apply_column(
    images: torch.Tensor, codes: np.ndarray, strengths: torch.Tensor, functions: Sequence[Operation]
) -> torch.Tensor:
    """Apply one operation to each image. codes: ascending."""
    present, starts = np.unique(codes, return_index=True)
    parts = []
    for code, first, end in zip(present.tolist(), starts, [*starts[1:], len(codes)], strict=True):
        part = images[first:end]
        parts.append(part if code < 0 else functions[code](part, strengths[first:end]))
    return torch.cat(parts)


def training_boxes(
    geometry: Geometry,
    stream: int,
    epoch: int,
    ids: Ids,
    widths: npt.NDArray[np.int32],
    heights: npt.NDArray[np.int32],
    views: Views = 0,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Draw a random crop and flip for each row in this epoch: boxes int32 [n, 4], flips bool [n]."""
    flips = (draw_uniforms(stream, epoch, ids, "flip", views) < 0.5) & geometry.flip
    if geometry.random_resized_crop is not None:
        return resized_boxes(geometry.random_resized_crop, stream, epoch, ids, widths, heights, views), flips
    side = geometry.side(widths, heights, geometry.pad)
    across, down = (draw_uniforms(stream, epoch, ids, what, views) for what in ("left", "top"))
    left = _draw_offset(across, widths + 2 * geometry.pad - side) - geometry.pad
    top = _draw_offset(down, heights + 2 * geometry.pad - side) - geometry.pad
    return np.stack([left, top, side, side], axis=1).astype(np.int32), flips


def draw_holes(
    geometry: Geometry, stream: int, epoch: int, ids: Ids, views: Views = 0
) -> npt.NDArray[np.int32] | None:
    """Draw the square to blank out in the crop of each row in this epoch; None without `cutout`.

    int32 [n, 4]: left, top, right and bottom in pixels of the crop. Its centre is any pixel, so it may extend beyond
    the crop.
    """
    if not geometry.cutout:
        return None
    drawn = (draw_uniforms(stream, epoch, ids, f"cutout {axis}", views) for axis in "xy")
    centre = [(each * geometry.size).astype(np.int32) for each in drawn]
    left, top = (each - geometry.cutout // 2 for each in centre)
    return np.stack([left, top, left + geometry.cutout, top + geometry.cutout], axis=1)


def resized_boxes(
    config: RandomResizedCropConfig,
    stream: int,
    epoch: int,
    ids: Ids,
    widths: npt.NDArray[np.int32],
    heights: npt.NDArray[np.int32],
    views: Views = 0,
) -> npt.NDArray[np.int32]:
    """Draw boxes of random area and aspect ratio inside the images, as torchvision's RandomResizedCrop: int32 [n, 4].

    If no attempt yields a box that fits, the box is the largest centred one whose aspect ratio is in range.
    """
    area = widths.astype(np.int64) * heights
    width, height = _largest_boxes(config, widths, heights)
    lowest, highest = math.log(config.ratio[0]), math.log(config.ratio[1])
    found = np.zeros(len(ids), bool)
    for attempt in range(_CROP_ATTEMPTS):
        share = _between(*config.scale, draw_uniforms(stream, epoch, ids, f"area {attempt}", views))
        aspect = np.exp(_between(lowest, highest, draw_uniforms(stream, epoch, ids, f"aspect {attempt}", views)))
        wide = np.rint(np.sqrt(area * share * aspect)).astype(np.int64)
        high = np.rint(np.sqrt(area * share / aspect)).astype(np.int64)
        fits = ~found & (wide > 0) & (wide <= widths) & (high > 0) & (high <= heights)
        width, height = np.where(fits, wide, width), np.where(fits, high, height)
        found |= fits
    left = np.where(found, draw_uniforms(stream, epoch, ids, "left", views), _CENTRE)
    top = np.where(found, draw_uniforms(stream, epoch, ids, "top", views), _CENTRE)
    left, top = _draw_offset(left, widths - width), _draw_offset(top, heights - height)
    return np.stack([left, top, width, height], axis=1).astype(np.int32)


def _largest_boxes(
    config: RandomResizedCropConfig, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return width and height of the largest box inside each image whose aspect ratio is in `config.ratio`."""
    lowest, highest = config.ratio
    width = np.clip(np.rint(heights * highest).astype(np.int64), 1, widths)
    height = np.clip(np.rint(widths / lowest).astype(np.int64), 1, heights)
    return width, height


def centre_boxes(
    geometry: Geometry, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the centre crops that predict passes and evaluation use: int32 [n, 4]."""
    side = geometry.side(widths, heights, 0)
    return np.stack([(widths - side) // 2, (heights - side) // 2, side, side], axis=1).astype(np.int32)


def _between(low: float, high: float, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return low + uniform * (high - low)


def _draw_offset(uniform: npt.NDArray[np.float64], room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Map uniform numbers in [0, 1) to integers from 0 to `room` inclusive, all equally likely."""
    return (uniform * (room + 1)).astype(np.int64)
