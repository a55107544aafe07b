"""Random and centre crops as integer pixel boxes, computed from the image sizes in the index."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.config.augmentation import RandomResizedCropConfig
from trainer.loading.sample_order import Ids, Views, draw_uniforms

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
