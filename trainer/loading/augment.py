"""Crops and flips as whole-pixel boxes, computed from the index's width and height and nothing else."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.loading.sample_order import Ids, draw_uniforms


@dataclass(frozen=True)
class Geometry:
    """How a stored image becomes the network's input."""

    size: int
    """Pixels of the network's square input."""
    resize: int | None
    """Cut as if the shorter side had first been resized to this; None: cut stored pixels as they are."""
    pad: int
    """Pixels around the image that a training crop may reach into."""
    flip: bool
    fill: str
    """`zero` or `edge`: what lies in the padding."""
    smooth_chroma: bool = True
    """Whether GPU decoders upsample chroma as CPU decoders do."""

    def side(self, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32], pad: int) -> npt.NDArray[np.int64]:
        """Side of the square box in stored pixels; the cut is scaled to `size` where they differ."""
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
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Random crop and flip of each sample in this epoch: boxes int32 [n, 4], flips bool [n]."""
    side = geometry.side(widths, heights, geometry.pad)
    left = _offset(draw_uniforms(stream, epoch, ids, "left"), widths + 2 * geometry.pad - side) - geometry.pad
    top = _offset(draw_uniforms(stream, epoch, ids, "top"), heights + 2 * geometry.pad - side) - geometry.pad
    flips = (draw_uniforms(stream, epoch, ids, "flip") < 0.5) & geometry.flip
    return np.stack([left, top, side, side], axis=1).astype(np.int32), flips


def centre_boxes(
    geometry: Geometry, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """The centre crop that predict passes and evaluation use: int32 [n, 4]."""
    side = geometry.side(widths, heights, 0)
    return np.stack([(widths - side) // 2, (heights - side) // 2, side, side], axis=1).astype(np.int32)


def _offset(uniform: npt.NDArray[np.float64], room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A whole number in 0..room, each equally likely."""
    return (uniform * (room + 1)).astype(np.int64)
