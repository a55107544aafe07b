"""From stored pixels to the network's: the cut on the CPU, the normalisation on any device."""

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

Pixels = npt.NDArray[np.uint8]


def cut(image: Pixels, box: npt.NDArray[np.int32], flip: bool, size: int, fill: str) -> Pixels:
    """Cut `box` out of uint8 [H, W, 3], scale it to `size` where it differs, mirror: uint8 [size, size, 3]."""
    left, top, width, height = (int(value) for value in box)
    rows, columns = image.shape[:2]
    outside = max(-left, -top, left + width - columns, top + height - rows, 0)
    if outside:
        around = ((outside, outside), (outside, outside), (0, 0))
        image = np.pad(image, around, mode="edge" if fill == "edge" else "constant")
        left, top = left + outside, top + outside
    if width == size and height == size:
        piece = image[top : top + height, left : left + width]
    else:
        corners = (left, top, left + width, top + height)
        scaled = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=corners)
        piece = np.asarray(scaled)
    return piece[:, ::-1] if flip else piece


class Normalise:
    """uint8 [n, size, size, 3] to float32 [n, 3, size, size] = (x / 255 - mean) / std, channels last."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.float() * self.scale + self.shift).permute(0, 3, 1, 2)
