"""From stored bytes to the network's pixels: decoded and cut on the CPU, normalised on any device."""

import warnings

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from shards.image_check import decode_rgb

Pixels = npt.NDArray[np.uint8]

_JPEG = b"\xff\xd8"
# TorchCodec, its announced successor, has no release for the oldest torch we support
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities", DeprecationWarning)


def decode(data: bytes) -> Pixels:
    """uint8 [height, width, 3] of a packed image; raises UndecodableImage.

    Packed images stand upright, so no EXIF orientation is looked for. JPEGs go through libjpeg-turbo in torchvision,
    with the same inverse DCT and smooth chroma upsampling as in Pillow, which checked them when they were packed.
    """
    if data.startswith(_JPEG):
        try:
            planes = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
            return planes.permute(1, 2, 0).numpy()
        except RuntimeError:
            pass  # Pillow takes more kinds, or says what is wrong
    return decode_rgb(data)


def cut(image: Pixels, box: npt.NDArray[np.int32], flip: bool, size: int, fill: str) -> Pixels:
    """Cut `box` out of uint8 [H, W, 3], scale the cut to `size` where it differs, mirror: uint8 [size, size, 3]."""
    left, top, width, height = (int(value) for value in box)
    rows, columns = image.shape[:2]
    outside = max(-left, -top, left + width - columns, top + height - rows, 0)
    if outside:
        ctx = ((outside, outside), (outside, outside), (0, 0))
        image = np.pad(image, ctx, mode="edge" if fill == "edge" else "constant")
        left, top = left + outside, top + outside
    piece = image[top : top + height, left : left + width]
    if width != size or height != size:
        piece = _scaled(piece, size)
    return piece[:, ::-1] if flip else piece


def _scaled(piece: Pixels, size: int) -> Pixels:
    """Bilinear, and averaging over the pixels that make one where the picture shrinks."""
    planes = torch.from_numpy(piece).permute(2, 0, 1)[None]
    scaled = F.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return scaled[0].permute(1, 2, 0).numpy()


class Normalise:
    """uint8 [n, size, size, 3] to `dtype` [n, 3, size, size] = (x / 255 - mean) / std, channels last.

    Computed in float32 whatever the type of the result.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.fits_cpu = device.type == "cpu" and dtype == torch.float32
        self.scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=device)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.is_cuda:  # in one pass over the pixels, since the network waits for the same memory
            out = torch.empty(pixels.shape, dtype=self.dtype, device=pixels.device)
            return torch.addcmul(self.shift, pixels, self.scale, out=out).permute(0, 3, 1, 2)
        count, height, width, channels = pixels.shape
        lines = pixels.reshape(count, height, width * channels).float()  # long lines: three values are slow to repeat
        lines.mul_(self.scale.repeat(width)).add_(self.shift.repeat(width))
        return lines.to(self.dtype).view(count, height, width, channels).permute(0, 3, 1, 2)

    def write(self, pixels: Pixels, out: npt.NDArray[np.float32]) -> None:
        """One picture into its place in a batch, both [size, size, 3]: bit for bit what calling this gives.

        By NumPy, which starts no threads of its own: the caller is one of many.
        """
        lines, width = out.reshape(len(out), -1), out.shape[1]
        lines[...] = pixels.reshape(lines.shape)
        lines *= np.tile(self.scale.numpy(), width)
        lines += np.tile(self.shift.numpy(), width)
