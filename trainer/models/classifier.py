"""The names of a network's classifier layers."""

from torch import nn


def classifier_names(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that map features to scores of classes; some networks have two."""
    cfg = getattr(network, "pretrained_cfg", {"classifier": "fc"})  # our own networks have no pretrained_cfg
    names = cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)
