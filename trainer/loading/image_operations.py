"""The augmentation operations as functions of torchvision: uint8 [3, H, W] and a strength to uint8 [3, H, W]."""

import math
from collections.abc import Callable, Mapping

import torch
from torchvision.transforms.v2 import functional as TF


def _shear(planes: torch.Tensor, along_x: float, along_y: float) -> torch.Tensor:
    degrees = [math.degrees(math.atan(along_x)), math.degrees(math.atan(along_y))]
    return TF.affine(planes, angle=0.0, translate=[0, 0], scale=1.0, shear=degrees, center=[0, 0])


def _translate(planes: torch.Tensor, along_x: float, along_y: float) -> torch.Tensor:
    pixels = [int(along_x * planes.shape[2]), int(along_y * planes.shape[1])]
    return TF.affine(planes, angle=0.0, translate=pixels, scale=1.0, shear=[0.0, 0.0])


APPLY: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "identity": lambda planes, _: planes,
    "brightness": TF.adjust_brightness,
    "contrast": TF.adjust_contrast,
    "saturation": TF.adjust_saturation,
    "hue": TF.adjust_hue,
    "sharpness": TF.adjust_sharpness,
    "shear_x": lambda planes, tangent: _shear(planes, tangent, 0.0),
    "shear_y": lambda planes, tangent: _shear(planes, 0.0, tangent),
    "translate_x": lambda planes, share: _translate(planes, share, 0.0),
    "translate_y": lambda planes, share: _translate(planes, 0.0, share),
    "rotate": TF.rotate,
    "posterize": lambda planes, bits: TF.posterize(planes, int(bits)),
    "solarize": TF.solarize,
    "autocontrast": lambda planes, _: TF.autocontrast(planes),
    "equalize": lambda planes, _: TF.equalize(planes),
}
