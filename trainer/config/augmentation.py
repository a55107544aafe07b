"""Sections of a recipe for the augmentation of training images; all are off by default."""

from typing import Annotated

from pydantic import Field, model_validator

from trainer.config.section import Section


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

    @property
    def is_on(self) -> bool:
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


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
