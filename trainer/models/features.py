"""The features of a network: the output of its penultimate layer, as timm's networks and our own give it."""

from typing import Any

import torch
from torch import Tensor, nn

from shards.errors import ConfigError


class PenultimateFeatures(nn.Module):
    """Maps images to the features that a network's classifier reads: [rows, features]; shares its weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network.forward_head(self.network.forward_features(images), pre_logits=True)
        return features.flatten(1)


def require_features(network: nn.Module, size: int, what: str, needed_by: str) -> None:
    """Raise ConfigError unless the network, in eval mode, gives features of an image.

    size: of the image, in pixels; what: the network; needed_by: who reads the features; both for the message.
    """
    try:
        with torch.no_grad():
            shape = tuple(PenultimateFeatures(network)(torch.zeros(1, 3, size, size)).shape)
    except Exception as error:  # a third-party network may raise anything
        raise ConfigError(
            f"{needed_by} reads the features of the penultimate layer, which {what} does not give by "
            f"forward_head(forward_features(images), pre_logits=True) ({str(error) or type(error).__name__}): choose "
            "a model that does, as most of timm's do, or leave the method out"
        ) from error
    if len(shape) != 2 or shape[0] != 1:
        raise ConfigError(
            f"{needed_by} reads the features of the penultimate layer, but those of {what} have the shape {shape}, "
            "not one row for each image: choose another model, or leave the method out"
        )
