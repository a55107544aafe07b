"""The features of a network: the output of its penultimate layer, as timm's networks and our own give it."""

from typing import Any

import torch
from torch import Tensor, nn

from shards.errors import ConfigError


def forward_with_features(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [rows, classes] and the features that the classifier reads [rows, features], by timm's functions.

    The head runs twice, which costs a pooling: some networks have two classifiers, or layers before the only one.
    """
    split: Any = network
    maps = split.forward_features(images)
    features: Tensor = split.forward_head(maps, pre_logits=True)
    return split.forward_head(maps), features.flatten(1)


def refuse_features(needed_by: str, what: str, why: str) -> ConfigError:
    """Return the error of a network that does not give the features that something reads."""
    return ConfigError(
        f"{needed_by} reads the features of the penultimate layer, which {what} does not give by "
        f"forward_head(forward_features(images), pre_logits=True) ({why}): set model.name to a network that does, as "
        "most of timm's do, or leave out what reads them"
    )


def require_features(network: nn.Module, size: int, what: str, needed_by: str) -> None:
    """Raise ConfigError unless the network, in eval mode, gives features of an image.

    Args:
        size: of the image, in pixels.
        what: the network, for the message.
        needed_by: what reads the features, for the message.
    """
    try:
        with torch.no_grad():
            _, features = forward_with_features(network, torch.zeros(1, 3, size, size))
    except Exception as error:  # a third-party network may raise anything
        raise refuse_features(needed_by, what, str(error) or type(error).__name__) from error
    if features.shape[0] != 1:
        raise refuse_features(needed_by, what, f"they have the shape {tuple(features.shape)}")
