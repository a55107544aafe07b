"""Chooses the network of an audit: one with pretrained weights if there are any."""

import logging
from pathlib import Path

from shards.errors import ConfigError
from trainer.auditing.settings import Start
from trainer.models.pretrained import describe_file, find_pretrained, input_settings

_log = logging.getLogger(__name__)

PREFERRED = {
    "cpu": ("resnet18.a1_in1k", "resnet18.tv_in1k", "resnet34.a1_in1k", "resnet50.a1_in1k", "resnet50.tv_in1k"),
    "cuda": ("resnet50.a1_in1k", "resnet50.tv_in1k", "resnet34.a1_in1k", "resnet18.a1_in1k", "resnet18.tv_in1k"),
}
"""Networks whose weights are looked for in the hub's cache; the first is downloaded if none is cached."""
SCRATCH = "resnet18"
_CPU_SIZE = 128
"""Largest input on a CPU; the preferred networks accept any size."""


def choose_network(model: str | None, weights: Path | None, device: str, download: bool = True) -> Start:
    """Return the network to fine-tune, or one to train from scratch if no pretrained weights can be had.

    model, weights: the user's choice, if any. download: whether weights may be fetched from the hub.
    """
    if weights is not None:
        return _from_file(model, weights)
    if model is not None:
        return _pretrained(model, device) if _find(model, download) else Start(model)
    for name in PREFERRED[device]:
        if _find(name, download=False):
            return _pretrained(name, device)
    if download and _find(PREFERRED[device][0], download=True):
        return _pretrained(PREFERRED[device][0], device)
    return Start(SCRATCH)


def _from_file(model: str | None, weights: Path) -> Start:
    if not weights.is_file():
        raise ConfigError(f"--weights: there is no file {weights}")
    name = model or describe_file(weights).get("architecture")
    if name is None:
        raise ConfigError(
            f"--weights: {weights.parent} has no config.json that names the network of {weights.name}: add "
            "--model NAME, with its name in timm"
        )
    return Start(name, weights=str(weights), image=input_settings(name, weights))


def _pretrained(name: str, device: str) -> Start:
    image = input_settings(name, None)
    if device == "cpu" and name in PREFERRED["cpu"]:
        image["size"] = min(image["size"], _CPU_SIZE)
    return Start(name, pretrained=True, image=image)


def _find(name: str, download: bool) -> bool:
    """Whether timm's weights of a network are in the hub's cache or, if allowed, can be downloaded into it."""
    try:
        return find_pretrained(name, download) is not None
    except ConfigError as error:
        _log.info("audit: %s", error)
        return False
