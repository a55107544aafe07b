"""Chooses the network of an audit: one with pretrained weights if there are any."""

import os
from pathlib import Path

from shards.errors import ConfigError, Fix, describe_unreadable
from shards.regular_file import open_regular
from trainer.auditing.settings import Start
from trainer.models.factory import require_known_model
from trainer.models.pretrained import NoPretrained, NotOnHub, describe_file, find_pretrained, input_settings

PREFERRED = {
    "cpu": ("resnet18.a1_in1k", "resnet18.tv_in1k", "resnet34.a1_in1k", "resnet50.a1_in1k", "resnet50.tv_in1k"),
    "cuda": ("resnet50.a1_in1k", "resnet50.tv_in1k", "resnet34.a1_in1k", "resnet18.a1_in1k", "resnet18.tv_in1k"),
}
"""Networks whose weights are looked for in the hub's cache; the first is downloaded if none is cached."""
SCRATCH = "resnet18"
_CPU_SIZE = 128
"""Largest input on a CPU; the preferred networks accept any size."""


def choose_network(model: str | None, weights: Path | None, device: str, download: bool = True) -> Start:
    """Return the pretrained network to start from, or one to train from scratch if no pretrained weights can be had.

    model, weights: the user's choice, if any. download: whether weights may be fetched from the hub.
    """
    if weights is not None:
        return _from_file(model, weights)
    if model is not None:
        require_known_model(model)
    names = PREFERRED[device] if model is None else (model,)
    try:
        for name in names:
            if find_pretrained(name, download=False) is not None:
                return _pretrained(name, device)
        if download:
            find_pretrained(names[0])
            return _pretrained(names[0], device)
        why = "none in the cache of the Hugging Face hub, and --no-download is given"
    except NotOnHub as error:
        return Start(model or SCRATCH, why_no_weights=error.why)
    except NoPretrained as error:
        why = error.why
    return Start(model or SCRATCH, why_no_weights=f"{why}; the cache can be copied from a machine with internet")


def _from_file(model: str | None, weights: Path) -> Start:
    try:
        os.close(open_regular(weights))
    except OSError as error:
        raise ConfigError(describe_unreadable("the file", weights, error), field="model.weights") from None
    name = model or describe_file(weights).get("architecture")
    if name is None:
        raise ConfigError(
            f"{weights.parent} has no config.json that names the network of {weights.name}",
            field="model.weights",
            fix=Fix("add {} NAME, with its name in timm", "model.name"),
        )
    return Start(name, weights=str(weights), image=input_settings(name, weights))


def _pretrained(name: str, device: str) -> Start:
    image = input_settings(name, None)
    if device == "cpu" and name in PREFERRED["cpu"]:
        image["size"] = min(image["size"], _CPU_SIZE)
    return Start(name, pretrained=True, image=image)
