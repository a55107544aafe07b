"""An augmentation of a package of its own: the negative of an image, or a darker image."""

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from trainer.config.augmentation import Augmentation, Drawn, Uniform
from trainer.config.section import Section


class ToyConfig(Section):
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the images that are changed."""
    darkest: Annotated[float, Field(ge=0, le=1)] = 0.5
    """An image is made darker by a factor between this and 1."""


def draw(config: ToyConfig, uniform: Uniform) -> Drawn:
    codes = (uniform("which") * 2).astype(np.int8)
    codes[uniform("applied") >= config.share] = -1
    factors = config.darkest + uniform("factor") * (1 - config.darkest)
    return codes[:, None], factors[:, None].astype(np.float32)


def negative(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    return 255 - images


def darker(images: torch.Tensor, strengths: torch.Tensor) -> torch.Tensor:
    return (images * strengths[:, None, None, None]).to(torch.uint8)


AUGMENTATION = Augmentation("toy_negative", ToyConfig, {"negative": negative, "darker": darker}, draw)
