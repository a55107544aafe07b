"""The operations of augmentations, on batches of images: uint8 [m, 3, h, w] and strengths float32 [m] to uint8.

All but `hue` give the pixels of Pillow's functions of the same name, on any device: they compute in integers, in the
order of Pillow's float32 arithmetic, or in float64.
"""

from collections.abc import Sequence

import torch

from trainer.config.augmentation import Operation

_FIXED = 65536.0  # Pillow computes affine transforms in fixed-point numbers of 16 fractional bits
_LEVELS = 256
_CHROMA = (5, 3, 1)  # of red, green, blue in the conversion from HSV


def _identity(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    return images


def _blend(degenerate: torch.Tensor, images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Interpolate from the degenerate image (factor 0) to the image (1) and beyond, as Image.blend."""
    start = degenerate.float()
    return (start + factors[:, None, None, None] * (images - start)).clamp(0, 255).to(torch.uint8)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return the luma of the images, as Pillow's mode L: int32 [m, 1, h, w]."""
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _brightness(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return _blend(images.new_zeros(()), images, factors)


def _saturation(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return _blend(_grey(images), images, factors)


def _contrast(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    mean = _grey(images).sum(dim=(1, 2, 3), keepdim=True).double() / (images.shape[2] * images.shape[3])
    return _blend((mean + 0.5).floor(), images, factors)


def _sharpness(images: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Blend with the mean over 3 x 3 pixels, in which the middle counts 5 times; the outermost pixels stay."""
    smooth = images.to(torch.int32)
    if min(images.shape[2:]) > 2:
        height, width = (size - 2 for size in images.shape[2:])
        total = 4 * smooth[:, :, 1:-1, 1:-1]
        for down in range(3):
            for across in range(3):
                total = total + smooth[:, :, down : down + height, across : across + width]
        smooth[:, :, 1:-1, 1:-1] = (2 * total + 13) // 26  # total / 13, rounded
    return _blend(smooth, images, factors)


def _posterize(images: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    kept = 256 - 2 ** (8 - bits.to(torch.int32))
    return (images.to(torch.int32) & kept[:, None, None, None]).to(torch.uint8)


def _solarize(images: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    return torch.where(images < thresholds[:, None, None, None], images, 255 - images)


def _invert(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    return 255 - images


def _look_up(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Replace each value by its entry in the table of its image and channel. tables: [m, 3, 256]"""
    return tables.gather(2, images.flatten(2).long()).to(torch.uint8).view(images.shape)


def _autocontrast(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    """Stretch each channel to 0 to 255."""
    values = images.flatten(2)
    low, high = (each.double()[:, :, None] for each in (values.amin(2), values.amax(2)))
    scale = torch.full_like(high, 255.0) / (high - low)  # `255.0 / tensor` would round twice
    levels = torch.arange(_LEVELS, device=images.device, dtype=torch.float64)
    stretched = (levels * scale + -low * scale).clamp(0, 255)
    return _look_up(images, torch.where(high > low, stretched, levels).to(torch.uint8))


def _equalize(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    """Spread each channel's values so that all levels become about equally frequent."""
    values = images.flatten(2).sort(dim=2).values  # counts by sorting: a scatter would not be deterministic on a GPU
    levels = torch.arange(_LEVELS, device=images.device, dtype=torch.int32).expand(*values.shape[:2], -1)
    up_to = torch.searchsorted(values.to(torch.int32).contiguous(), levels.contiguous(), right=True)
    below = torch.cat([torch.zeros_like(up_to[:, :, :1]), up_to[:, :, :-1]], dim=2)
    total = values.shape[2]
    of_last = (values == values[:, :, -1:]).sum(dim=2, keepdim=True)
    step = (total - of_last) // 255
    spread = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _look_up(images, torch.where(step > 0, spread, levels))


def _hue(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotate the hue in HSV space, in float32 as torchvision does it for tensors."""
    scaled = images.float() / 255
    red, green, blue = scaled.unbind(dim=1)
    low, high = torch.aminmax(scaled, dim=1)
    span = high - low
    divisor = torch.where(span > 0, span, 1.0)
    hue = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = (hue + 6 * turns[:, None, None]).remainder(6)
    channels = []
    for offset in _CHROMA:
        place = (hue + offset).remainder(6)
        channels.append(high - span * torch.minimum(place, 4 - place).clamp(0, 1))
    return (torch.stack(channels, dim=1) * 255.999).to(torch.uint8)


def _transform(images: torch.Tensor, coefficients: Sequence[torch.Tensor | float]) -> torch.Tensor:
    """Fill each pixel (x, y) with that at (a x + b y + c, d x + e y + f), or 0, as Image.transform with NEAREST.

    coefficients: a to f, float64 [m] or a number.
    """
    a, b, c, d, e, f = (
        each if isinstance(each, torch.Tensor) else images.new_full((len(images),), each, dtype=torch.float64)
        for each in coefficients
    )
    height, width = images.shape[2:]
    y, x = torch.arange(height, device=images.device)[:, None], torch.arange(width, device=images.device)
    across, down = (
        (_fix(start + along_x * 0.5 + along_y * 0.5) + _fix(along_x) * x + _fix(along_y) * y) >> 16
        for along_x, along_y, start in ((a, b, c), (d, e, f))
    )
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    source = torch.where(inside, down * width + across, 0).flatten(1)[:, None].expand(-1, 3, -1)
    return (images.flatten(2).gather(2, source).view(images.shape) * inside[:, None]).to(torch.uint8)


def _fix(values: torch.Tensor) -> torch.Tensor:
    """Convert to fixed-point numbers: int64 [m, 1, 1]."""
    return (values * _FIXED + 0.5).floor().long()[:, None, None]


def _shear_x(images: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
    return _transform(images, (1.0, tangents.double(), 0.0, 0.0, 1.0, 0.0))


def _shear_y(images: torch.Tensor, tangents: torch.Tensor) -> torch.Tensor:
    return _transform(images, (1.0, 0.0, 0.0, tangents.double(), 1.0, 0.0))


def _translate_x(images: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return _transform(images, (1.0, 0.0, -(shares * images.shape[3]).trunc().double(), 0.0, 1.0, 0.0))


def _translate_y(images: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return _transform(images, (1.0, 0.0, 0.0, 0.0, 1.0, -(shares * images.shape[2]).trunc().double()))


def _rotate(images: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """Rotate counter-clockwise around the centre, as Image.rotate."""
    angles = -torch.deg2rad(degrees.double())
    cosine, sine = angles.cos(), angles.sin()
    x, y = images.shape[3] / 2, images.shape[2] / 2
    start_x, start_y = x - (cosine * x + sine * y), y - (cosine * y - sine * x)
    return _transform(images, (cosine, sine, start_x, -sine, cosine, start_y))


# A draw refers to a position in this table: a change of order would alter the results of existing recipes.
OPERATIONS: dict[str, Operation] = {
    "identity": _identity,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
    "rotate": _rotate,
    "brightness": _brightness,
    "saturation": _saturation,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "hue": _hue,
    "invert": _invert,
}
