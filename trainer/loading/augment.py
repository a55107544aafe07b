"""Random and centre crops as integer pixel boxes, computed from the image sizes in the index."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.loading.sample_order import Ids, draw_uniforms


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
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Draw a random crop and flip for each sample in this epoch: boxes int32 [n, 4], flips bool [n]."""
    side = geometry.side(widths, heights, geometry.pad)
    left = _draw_offset(draw_uniforms(stream, epoch, ids, "left"), widths + 2 * geometry.pad - side) - geometry.pad
    top = _draw_offset(draw_uniforms(stream, epoch, ids, "top"), heights + 2 * geometry.pad - side) - geometry.pad
    flips = (draw_uniforms(stream, epoch, ids, "flip") < 0.5) & geometry.flip
    return np.stack([left, top, side, side], axis=1).astype(np.int32), flips


def centre_boxes(
    geometry: Geometry, widths: npt.NDArray[np.int32], heights: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Return the centre crops that predict passes and evaluation use: int32 [n, 4]."""
    side = geometry.side(widths, heights, 0)
    return np.stack([(widths - side) // 2, (heights - side) // 2, side, side], axis=1).astype(np.int32)


def _draw_offset(uniform: npt.NDArray[np.float64], room: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Map uniform numbers in [0, 1) to integers from 0 to `room` inclusive, all equally likely."""
    return (uniform * (room + 1)).astype(np.int64)
