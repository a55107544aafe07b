"""A network's classifier layers: their names, and how they start on given features."""

import torch
from torch import nn

_START = 0.01
"""Standard deviation of the first scores, for features whose root mean square is 1."""


def classifier_names(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that map features to scores of classes; some networks have two."""
    cfg = getattr(network, "pretrained_cfg", {"classifier": "fc"})  # our own networks have no pretrained_cfg
    names = cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def start_classifier(network: nn.Module, seed: int) -> None:
    """Redraw the classifier so small that every class starts equally likely, whatever the scale of the features.

    timm draws some classifiers so large (EfficientNet's) that the loss starts far above that of guessing, and others
    as zeros (ViT's), which would make the two networks of a pair identical.
    """
    generator, layers = torch.Generator().manual_seed(seed), dict(network.named_modules())
    for name in classifier_names(network):
        layer = layers.get(name)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            features = layer.weight[0].numel()
            nn.init.normal_(layer.weight, std=_START / features**0.5, generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
