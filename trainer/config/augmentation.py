"""Sections of a recipe for the augmentation of training images, all off by default, and augmentations of packages."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from trainer.config.section import Section

if TYPE_CHECKING:
    import torch

PLUGINS = PluginGroup("incv.augmentations", "augmentation")

Drawn = tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]
"""Operations [n, k] and strengths [n, k] of n images; -1: no operation."""
Uniform = Callable[[str], npt.NDArray[np.float64]]
"""Draws one number in [0, 1) per row, float64 [n]. Its argument names the purpose; draws for different purposes are
independent. Each depends on the run's seed, the epoch, and the row's sample and view alone."""
Operation = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Turns images, uint8 [m, 3, h, w], and their strengths, float32 [m], into images of the same shape and dtype.

An image must not depend on the others. On a GPU, an operation should not wait for the device.
"""


@dataclass(frozen=True)
class Augmentation:
    """Operations on training images, drawn for each row, between crop and normalisation.

    A package offers one through an entry point of its name, in the group `incv.augmentations`.
    """

    name: str
    options: Any
    """The type of `image.augment.NAME`: a Section, or another type that Pydantic validates."""
    operations: Mapping[str, Operation]
    """By name, for `execution.trace`."""
    draw: Callable[[Any, Uniform], Drawn]
    """Draws the operations of n rows from the options: positions in `operations`, in the order of application."""


@cache
def get_augmentation(name: str) -> Augmentation:
    """Return the augmentation that a package offers; raise ConfigError if there is none or it is unusable."""
    entry = PLUGINS.find(name, ())
    if entry is None:
        offered = PLUGINS.names()
        hint = did_you_mean(name, offered) if offered else "no installed package offers any"
        raise ConfigError(f"`image.augment`: unknown augmentation {name!r}; {hint}")
    return PLUGINS.load(entry, Augmentation)


def check_options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Validate the options of the augmentations of packages, by name."""
    for name, values in chosen.items():
        try:
            read_options(get_augmentation(name), values)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return chosen


def read_options(augmentation: Augmentation, values: Any) -> Any:
    """Return the options of an augmentation; raise ConfigError, with all wrong keys, if they do not fit."""
    try:
        return TypeAdapter(augmentation.options).validate_json(json.dumps(values))  # via JSON, as the recipe itself
    except ValidationError as error:
        wrong = [
            f"`{'.'.join(['image.augment', augmentation.name, *map(str, each['loc'])])}`: {each['msg']}"
            for each in error.errors()
        ]
        raise ConfigError("; ".join(wrong)) from None


AugmentOptions = Annotated[dict[str, Any], AfterValidator(check_options)]


class RandomResizedCropConfig(Section):
    """Training crops of random area and aspect ratio, scaled to the network's input (as torchvision does it)."""

    scale: tuple[float, float]
    """Smallest and largest area of a crop, as a share of the stored image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio of a crop, width / height; drawn uniformly on a logarithmic scale."""

    @model_validator(mode="after")
    def _check_consistency(self) -> "RandomResizedCropConfig":
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError("image.random_resized_crop.scale must be two increasing numbers above 0, at most 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError("image.random_resized_crop.ratio must be two increasing numbers above 0")
        return self


class ColorJitterConfig(Section):
    """Random changes of colour, in random order (as torchvision's ColorJitter); 0 leaves a property unchanged."""

    brightness: Annotated[float, Field(ge=0)] = 0.0
    """The factor is drawn from 1 - brightness (at least 0) to 1 + brightness."""
    contrast: Annotated[float, Field(ge=0)] = 0.0
    """The factor is drawn from 1 - contrast (at least 0) to 1 + contrast."""
    saturation: Annotated[float, Field(ge=0)] = 0.0
    """The factor is drawn from 1 - saturation (at least 0) to 1 + saturation."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The hue is rotated by -hue to hue, in full turns of the colour circle."""


class RandAugmentConfig(Section):
    """RandAugment (Cubuk et al. 2019): operations drawn at random, all of the same magnitude."""

    operations: Annotated[int, Field(ge=0)] = 0
    """Operations per image, drawn with replacement from the 14 of torchvision's RandAugment; 0: none. Often 2."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of the operations on torchvision's scale, which ends at 30."""


class MixupConfig(Section):
    """mixup (Zhang et al. 2018): train on weighted means of two images and of their labels."""

    alpha: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the first image is drawn from Beta(alpha, alpha); 0: no mixup. Often 0.2."""
