"""The backbones that an audit chooses from: their cost, the sizes of images for them, and their licences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.models.pretrained import base_name

_AT = 224
"""Pixels of the images that `gmacs` is for."""
_GPU_GMACS_PER_S = 10_000
"""About what a T4 does in half precision; later GPUs are several times as fast."""
_BYTES = 4  # of a parameter


@dataclass(frozen=True)
class Backbone:
    """A pretrained network whose features an audit may use."""

    name: str
    """In timm, with the tag of the weights."""
    gmacs: float
    """10^9 multiply-adds for an image of 224 pixels."""
    parameters: float
    """In millions."""
    sizes: tuple[int, ...]
    """Sides of the images that an audit offers, in pixels, largest first; for a ViT, multiples of its patch."""
    licence: str = "Apache-2.0"
    is_permissive: bool = True
    """Whether the licence is a permissive one. Other weights are used from the cache or by name, never chosen to be
    downloaded."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the architecture, for the sizes above."""

    @property
    def megabytes(self) -> int:
        """Size of the file of weights."""
        return round(self.parameters * _BYTES)

    def gmacs_at(self, size: int) -> float:
        """Return the 10^9 multiply-adds for an image of this size."""
        return self.gmacs * (size / _AT) ** 2

    def gpu_seconds(self, samples: int, size: int) -> float:
        """Return about how long a modest GPU takes for the features of some images."""
        return samples * self.gmacs_at(size) / _GPU_GMACS_PER_S


_ANY_SIZE = {"dynamic_img_size": True}  # timm interpolates the position embeddings
_CNN_SIZES = (224, 160, 128)

# Best first, as we expect: ViTs trained on hundreds of millions of images, base before small (linear classifiers on
# ImageNet, as published: DINOv3 85.0 and 81.4 %, DINOv2 84.5 and 81.1 %), whose features suit images unlike ImageNet;
# then networks trained on ImageNet's labels, by accuracy. docs/own-data.md has what was measured.
BACKBONES = (
    Backbone(
        "vit_base_patch16_dinov3.lvd1689m", 17.9, 85.6, (256, 224, 160, 128), "DINOv3-License", False, _ANY_SIZE
    ),
    Backbone("vit_base_patch14_dinov2.lvd142m", 23.2, 86.6, (224, 168, 126), options=_ANY_SIZE),
    Backbone("vit_base_patch16_siglip_224.v2_webli", 17.7, 92.9, (224, 160, 128), options=_ANY_SIZE),
    Backbone(
        "vit_small_patch16_dinov3.lvd1689m", 4.7, 21.6, (256, 224, 160, 128), "DINOv3-License", False, _ANY_SIZE
    ),
    Backbone("vit_small_patch14_dinov2.lvd142m", 6.1, 22.1, (224, 168, 126), options=_ANY_SIZE),
    Backbone("convnext_small.in12k_ft_in1k", 8.7, 50.2, _CNN_SIZES),
    Backbone("convnext_tiny.in12k_ft_in1k", 4.5, 28.6, _CNN_SIZES),
    Backbone("resnet50.a1_in1k", 4.1, 25.6, _CNN_SIZES),
    Backbone("tf_efficientnet_lite0.in1k", 0.38, 4.65, _CNN_SIZES),
    Backbone("resnet18.a1_in1k", 1.8, 11.7, _CNN_SIZES),
)


def find_backbone(name: str) -> Backbone | None:
    """Return the backbone of this name, or of this architecture if the name has no tag."""
    for backbone in BACKBONES:
        if name in (backbone.name, base_name(backbone.name)):
            return backbone
    return None
