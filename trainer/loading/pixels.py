"""Decode, crop and augment images on the CPU; normalise them on any device."""

import warnings

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from shards.image_check import decode_rgb
from trainer.loading.augment import Draws, apply

Pixels = npt.NDArray[np.uint8]

_JPEG = b"\xff\xd8"
# torchvision announces TorchCodec as its successor, which has no release for the oldest torch we support.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities", DeprecationWarning)


def decode(data: bytes) -> Pixels:
    """Decode a packed image to uint8 [height, width, 3]; raise UndecodableImage if that fails.

    Packing has already applied the EXIF orientation, so it is ignored here. JPEGs are decoded by torchvision's
    libjpeg-turbo, with the same inverse DCT and smooth chroma upsampling as in Pillow, which checked them at packing.
    """
    if data.startswith(_JPEG):
        from torchvision.io import ImageReadMode, decode_jpeg  # imported here: it takes as long as torch itself

        try:
            planes = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
            return planes.permute(1, 2, 0).numpy()
        except RuntimeError:
            pass  # Pillow supports more JPEG variants, or raises a clear error
    return decode_rgb(data)


def crop(image: Pixels, box: npt.NDArray[np.int32], flip: bool, size: int, fill: str) -> Pixels:
    """Crop `box` from uint8 [H, W, 3], scale it to `size` if needed, and flip it if `flip`: uint8 [size, size, 3]."""
    left, top, width, height = (int(value) for value in box)
    rows, columns = image.shape[:2]
    pad = max(-left, -top, left + width - columns, top + height - rows, 0)
    if pad:
        image = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="edge" if fill == "edge" else "constant")
        left, top = left + pad, top + pad
    cropped = image[top : top + height, left : left + width]
    if width != size or height != size:
        cropped = _resize(cropped, size)
    return cropped[:, ::-1] if flip else cropped


def _resize(image: Pixels, size: int) -> Pixels:
    """Resize to size x size with bilinear interpolation, antialiased when downscaling."""
    planes = torch.from_numpy(image).permute(2, 0, 1)[None]
    scaled = F.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return scaled[0].permute(1, 2, 0).numpy()


def augment(image: Pixels, draws: Draws) -> Pixels:
    """Apply the operations of one row's draws to its crop, uint8 [H, W, 3]."""
    if not draws.operations.size:
        return image
    planes = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None]
    return apply(planes, draws)[0].permute(1, 2, 0).numpy()


class Normalise:
    """Normalises uint8 [n, size, size, 3] to (x / 255 - mean) / std: `dtype` [n, 3, size, size], channels last.

    Computes in float32 for every `dtype`.
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
        if pixels.is_cuda:  # one fused pass, because this competes with the network for memory bandwidth
            out = torch.empty(pixels.shape, dtype=self.dtype, device=pixels.device)
            return torch.addcmul(self.shift, pixels, self.scale, out=out).permute(0, 3, 1, 2)
        count, height, width, channels = pixels.shape
        lines = pixels.reshape(count, height, width * channels).float()  # broadcasting over 3 channels is slow
        lines.mul_(self.scale.repeat(width)).add_(self.shift.repeat(width))
        return lines.to(self.dtype).view(count, height, width, channels).permute(0, 3, 1, 2)

    def write(self, pixels: Pixels, out: npt.NDArray[np.float32]) -> None:
        """Normalise one image into `out`, both [size, size, 3]; the result is bitwise equal to that of `__call__`.

        Uses NumPy, which starts no threads, because the caller is one of many decoding threads.
        """
        lines, width = out.reshape(len(out), -1), out.shape[1]
        lines[...] = pixels.reshape(lines.shape)
        lines *= np.tile(self.scale.numpy(), width)
        lines += np.tile(self.shift.numpy(), width)


def augment_and_normalise(crops: torch.Tensor, draws: Draws, normalise: Normalise) -> torch.Tensor:
    """Apply the rows' operations to their crops and normalise them, on the device: uint8 [n, size, size, 3]."""
    return normalise(apply(crops.permute(0, 3, 1, 2), draws).permute(0, 2, 3, 1))
