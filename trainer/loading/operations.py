"""RandAugment and colour jitter: which operations each sample gets, as a pure function. `pixels` applies them."""

from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from trainer.config.augmentation import ColorJitterConfig, RandAugmentConfig
from trainer.loading.sample_order import Ids, Views, draw_uniforms


@dataclass(frozen=True)
class Operation:
    """One operation on an image."""

    name: str
    strength: float
    """A factor (brightness, contrast, saturation, sharpness), turns (hue), a tangent (shear), a share of the side
    (translate), degrees (rotate), bits (posterize), a grey level (solarize), or 0 for operations without strength."""


Operations = tuple[Operation, ...]
"""The operations of one image, in the order in which they are applied."""


@dataclass(frozen=True)
class Augmentation:
    """The operations on training images that follow the crop; by default none."""

    rand_augment: RandAugmentConfig = field(default_factory=RandAugmentConfig)
    color_jitter: ColorJitterConfig = field(default_factory=ColorJitterConfig)

    def draw(self, stream: int, epoch: int, ids: Ids, views: Views = 0) -> list[Operations]:
        """Draw the operations of each sample in this epoch, RandAugment's first; [] if none are set."""
        drawn = []
        if self.rand_augment.operations:
            drawn.append(draw_rand_augment(self.rand_augment, stream, epoch, ids, views))
        if self.color_jitter.is_on:
            drawn.append(draw_jitter(self.color_jitter, stream, epoch, ids, views))
        return [tuple(chain(*parts)) for parts in zip(*drawn, strict=True)]


NO_AUGMENTATION = Augmentation()


def draw_jitter(config: ColorJitterConfig, stream: int, epoch: int, ids: Ids, views: Views = 0) -> list[Operations]:
    """Draw the strength of each property that `config` sets, and the order of these operations."""
    limits = {
        "brightness": (max(0.0, 1.0 - config.brightness), 1.0 + config.brightness),
        "contrast": (max(0.0, 1.0 - config.contrast), 1.0 + config.contrast),
        "saturation": (max(0.0, 1.0 - config.saturation), 1.0 + config.saturation),
        "hue": (-config.hue, config.hue),
    }
    names = [name for name in limits if getattr(config, name) > 0]
    drawn = [
        limits[name][0]
        + draw_uniforms(stream, epoch, ids, f"jitter {name}", views) * (limits[name][1] - limits[name][0])
        for name in names
    ]
    places = [draw_uniforms(stream, epoch, ids, f"place of {name}", views) for name in names]
    order = np.argsort(places, axis=0, kind="stable")
    return [
        tuple(Operation(names[which], float(drawn[which][row])) for which in order[:, row]) for row in range(len(ids))
    ]


# A draw refers to a position in this tuple: a change would alter the results of existing recipes.
RAND_AUGMENT = (
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness"),
    *("saturation", "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
_MAX_MAGNITUDE = 30
# Strengths at full magnitude, as in torchvision; positive or negative with equal probability.
_FACTORS = {"brightness": 0.9, "saturation": 0.9, "contrast": 0.9, "sharpness": 0.9}
_DISPLACEMENTS = {
    "shear_x": 0.3,
    "shear_y": 0.3,
    "rotate": 30.0,
    "translate_x": 150 / 331,
    "translate_y": 150 / 331,
}


def draw_rand_augment(
    config: RandAugmentConfig, stream: int, epoch: int, ids: Ids, views: Views = 0
) -> list[Operations]:
    """Draw `config.operations` operations per sample, with replacement and a random sign."""
    drawn: list[Operations] = [()] * len(ids)
    for number in range(config.operations):
        which = (draw_uniforms(stream, epoch, ids, f"operation {number}", views) * len(RAND_AUGMENT)).astype(int)
        negative = draw_uniforms(stream, epoch, ids, f"sign {number}", views) < 0.5
        for row in range(len(ids)):
            operation = rand_augment_operation(RAND_AUGMENT[which[row]], config.magnitude, bool(negative[row]))
            drawn[row] += (operation,)
    return drawn


def rand_augment_operation(name: str, magnitude: int, negative: bool = False) -> Operation:
    """Return an operation of RandAugment with its strength. negative: the sign, if the operation has one."""
    share = magnitude / _MAX_MAGNITUDE
    signed = -share if negative else share
    if name in _FACTORS:
        return Operation(name, 1.0 + signed * _FACTORS[name])
    if name in _DISPLACEMENTS:
        return Operation(name, signed * _DISPLACEMENTS[name])
    unsigned = {"posterize": float(8 - round(4 * share)), "solarize": 255.0 * (1.0 - share)}
    return Operation(name, unsigned.get(name, 0.0))
