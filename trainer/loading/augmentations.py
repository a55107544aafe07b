"""The built-in augmentations AutoAugment, RandAugment and colour jitter, and the list of those that a recipe sets.

What a row gets is a pure function of (stream, epoch, view, sample_id); `augment.apply` makes the pixels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.config.augmentation import (
    Augmentation,
    ColorJitterConfig,
    Drawn,
    Operation,
    RandAugmentConfig,
    Uniform,
    get_augmentation,
    read_options,
)
from trainer.config.schema import ImageConfig
from trainer.loading.operations import OPERATIONS
from trainer.loading.sample_order import Ids, Views, draw_uniforms

_CODES = {name: code for code, name in enumerate(OPERATIONS)}

# The operations of torchvision's RandAugment, which are the first of the table.
RAND_AUGMENT = tuple(OPERATIONS)[:14]
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


def draw_rand_augment(config: RandAugmentConfig, uniform: Uniform) -> Drawn:
    """Draw `config.operations` operations per row, with replacement and a random sign."""
    numbers = range(config.operations)
    codes = [(uniform(f"operation {number}") * len(RAND_AUGMENT)).astype(np.int8) for number in numbers]
    shares = np.float64(config.magnitude / _MAX_MAGNITUDE)
    return _join([(each, strengths_at(each, shares, uniform(f"sign {at}"))) for at, each in enumerate(codes)])


def strengths_at(
    codes: npt.NDArray[np.int8], shares: npt.NDArray[np.float64] | np.float64, signs: npt.NDArray[np.float64]
) -> npt.NDArray[np.float32]:
    """Return the strengths of operations at a share of the full magnitude: float32 [n].

    signs: uniform; below 0.5 the strength is negative, if the operation has a sign.
    """
    signed = np.where(signs < 0.5, -shares, shares)
    strengths = np.zeros(len(codes))
    for name, most in _FACTORS.items():
        strengths = np.where(codes == _CODES[name], 1.0 + signed * most, strengths)
    for name, most in _DISPLACEMENTS.items():
        strengths = np.where(codes == _CODES[name], signed * most, strengths)
    strengths = np.where(codes == _CODES["posterize"], 8 - np.rint(4 * shares), strengths)
    strengths = np.where(codes == _CODES["solarize"], 255.0 * (1.0 - shares), strengths)
    return strengths.astype(np.float32)


def draw_jitter(config: ColorJitterConfig, uniform: Uniform) -> Drawn:
    """Draw the strength of each property that `config` sets, and the order of these operations."""
    limits = {
        "brightness": (max(0.0, 1.0 - config.brightness), 1.0 + config.brightness),
        "contrast": (max(0.0, 1.0 - config.contrast), 1.0 + config.contrast),
        "saturation": (max(0.0, 1.0 - config.saturation), 1.0 + config.saturation),
        "hue": (-config.hue, config.hue),
    }
    names = [name for name in limits if getattr(config, name) > 0]
    if not names:
        return _join([])
    drawn = [limits[name][0] + uniform(f"jitter {name}") * (limits[name][1] - limits[name][0]) for name in names]
    order = np.argsort([uniform(f"place of {name}") for name in names], axis=0, kind="stable")
    codes = np.array([_CODES[name] for name in names], np.int8)[order]
    return codes.T, np.take_along_axis(np.array(drawn), order, axis=0).T.astype(np.float32)


# Two operations per line, each with its probability and its magnitude from 0 to 9; a row draws one line.
POLICIES = {
    "cifar10": """
        invert 0.1 0, contrast 0.2 6
        rotate 0.7 2, translate_x 0.3 9
        sharpness 0.8 1, sharpness 0.9 3
        shear_y 0.5 8, translate_y 0.7 9
        autocontrast 0.5 0, equalize 0.9 0
        shear_y 0.2 7, posterize 0.3 7
        saturation 0.4 3, brightness 0.6 7
        sharpness 0.3 9, brightness 0.7 9
        equalize 0.6 0, equalize 0.5 0
        contrast 0.6 7, sharpness 0.6 5
        saturation 0.7 7, translate_x 0.5 8
        equalize 0.3 0, autocontrast 0.4 0
        translate_y 0.4 3, sharpness 0.2 6
        brightness 0.9 6, saturation 0.2 8
        solarize 0.5 2, invert 0.0 0
        equalize 0.2 0, autocontrast 0.6 0
        equalize 0.2 0, equalize 0.6 0
        saturation 0.9 9, equalize 0.6 0
        autocontrast 0.8 0, solarize 0.2 8
        brightness 0.1 3, saturation 0.7 0
        solarize 0.4 5, autocontrast 0.9 0
        translate_y 0.9 9, translate_y 0.7 9
        autocontrast 0.9 0, solarize 0.8 3
        equalize 0.8 0, invert 0.1 0
        translate_y 0.7 9, autocontrast 0.9 0
    """,
    "imagenet": """
        posterize 0.4 8, rotate 0.6 9
        solarize 0.6 5, autocontrast 0.6 0
        equalize 0.8 0, equalize 0.6 0
        posterize 0.6 7, posterize 0.6 6
        equalize 0.4 0, solarize 0.2 4
        equalize 0.4 0, rotate 0.8 8
        solarize 0.6 3, equalize 0.6 0
        posterize 0.8 5, equalize 1.0 0
        rotate 0.2 3, solarize 0.6 8
        equalize 0.6 0, posterize 0.4 6
        rotate 0.8 8, saturation 0.4 0
        rotate 0.4 9, equalize 0.6 0
        equalize 0.0 0, equalize 0.8 0
        invert 0.6 0, equalize 1.0 0
        saturation 0.6 4, contrast 1.0 8
        rotate 0.8 8, saturation 1.0 2
        saturation 0.8 8, solarize 0.8 7
        sharpness 0.4 7, invert 0.6 0
        shear_x 0.6 5, equalize 1.0 0
        saturation 0.4 0, equalize 0.6 0
        equalize 0.4 0, solarize 0.2 4
        solarize 0.6 5, autocontrast 0.6 0
        invert 0.6 0, equalize 1.0 0
        saturation 0.6 4, contrast 1.0 8
        equalize 0.8 0, equalize 0.6 0
    """,
}
_MAX_LEVEL = 9


def draw_auto_augment(policy: Literal["cifar10", "imagenet"] | None, uniform: Uniform) -> Drawn:
    """Draw one of the policy's pairs of operations per row, and which of the two are applied."""
    if policy is None:
        return _join([])
    pairs = [line.split(",") for line in POLICIES[policy].strip().splitlines()]
    which = (uniform("policy") * len(pairs)).astype(np.int64)
    columns = []
    for place in range(2):
        names, chances, levels = zip(*(pair[place].split() for pair in pairs), strict=True)
        codes = np.array([_CODES[name] for name in names], np.int8)[which]
        shares = np.array(levels, np.float64)[which] / _MAX_LEVEL
        strengths = strengths_at(codes, shares, uniform(f"policy sign {place}"))
        applied = uniform(f"policy chance {place}") < np.array(chances, np.float64)[which]
        columns.append((np.where(applied, codes, np.int8(-1)), np.where(applied, strengths, np.float32(0))))
    return _join(columns)


def _join(columns: list[tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]]) -> Drawn:
    """Join columns [n] into arrays [n, k]; [0, 0] if there are none."""
    if not columns:
        return np.empty((0, 0), np.int8), np.empty((0, 0), np.float32)
    codes, strengths = zip(*columns, strict=True)
    return np.stack(codes, axis=1), np.stack(strengths, axis=1)


BUILT_IN = (
    Augmentation("auto_augment", Literal["cifar10", "imagenet"], OPERATIONS, draw_auto_augment),
    Augmentation("rand_augment", RandAugmentConfig, OPERATIONS, draw_rand_augment),
    Augmentation("color_jitter", ColorJitterConfig, OPERATIONS, draw_jitter),
)
"""In the order in which they are applied; each reads the key of its name in the section `image`."""


@dataclass(frozen=True)
class Augmentations:
    """Augmentations with their options, in the order in which they are applied."""

    chosen: tuple[tuple[Augmentation, Any], ...] = ()

    @cached_property
    def table(self) -> dict[str, Operation]:
        """The operations to whose positions draws refer: the built-in ones, then those of packages."""
        others = [each for each, _ in self.chosen if each.operations is not OPERATIONS]
        return OPERATIONS | {f"{each.name}.{name}": run for each in others for name, run in each.operations.items()}

    def draw(self, stream: int, epoch: int, ids: Ids, views: Views = 0) -> Drawn:
        """Draw the operations of each row, as positions in `table`: int8 [n, k] and float32 [n, k]."""
        codes, strengths = [np.empty((len(ids), 0), np.int8)], [np.empty((len(ids), 0), np.float32)]
        start = len(OPERATIONS)
        for augmentation, options in self.chosen:
            built_in = augmentation.operations is OPERATIONS
            prefix = "" if built_in else f"{augmentation.name}: "

            def uniform(what: str, prefix: str = prefix) -> npt.NDArray[np.float64]:
                return draw_uniforms(stream, epoch, ids, prefix + what, views)

            own, own_strengths = augmentation.draw(options, uniform)
            if own.size:
                codes.append(own if built_in else np.where(own < 0, own, own + start).astype(np.int8))
                strengths.append(own_strengths.astype(np.float32))
            start += 0 if built_in else len(augmentation.operations)
        return np.concatenate(codes, axis=1), np.concatenate(strengths, axis=1)


NO_AUGMENTATIONS = Augmentations()


def build_augmentations(image: ImageConfig) -> Augmentations:
    """Return the augmentations that a recipe sets; raise ConfigError if one of a package is unusable."""
    built_in = [(each, getattr(image, each.name)) for each in BUILT_IN]
    others = [get_augmentation(name) for name in sorted(image.augment)]
    return Augmentations((*built_in, *((each, read_options(each, image.augment[each.name])) for each in others)))
