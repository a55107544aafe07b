"""Chooses the network of an audit: the best pretrained one that can be had, and that takes minutes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from shards.errors import ConfigError, Fix, describe_unreadable
from shards.regular_file import open_regular
from trainer.auditing.backbones import BACKBONES, find_backbone
from trainer.auditing.consent import require_consent, require_downloads
from trainer.auditing.settings import Start
from trainer.models.factory import require_known_model
from trainer.models.pretrained import (
    NoPretrained,
    NotOnHub,
    describe_cache_folder,
    describe_file,
    find_pretrained,
    input_settings,
)

SCRATCH = "resnet18"
SUGGESTED = "vit_small_patch14_dinov2.lvd142m"
"""For any machine, where none can be had: a network small enough for a CPU."""
_SMALLER = (160, 128, 96)
"""Sizes that are tried below the own size of a network that is no backbone of the list."""

InTime = Callable[[Start], bool]
"""Whether the audit with this network and size takes minutes on this machine."""


def choose_network(
    model: str | None, weights: Path | None, size: int | None, in_time: InTime, download: bool | None = True
) -> Start:
    """Return the pretrained network to start from, or one to train from scratch if no pretrained weights can be had.

    Args:
        model, weights, size: the user's choice, if any.
        in_time: decides between backbones, and between sizes of their images.
        download: whether weights may be fetched from the hub; None: with consent.
    """
    if weights is not None:
        return _largest_in_time([_from_file(model, weights, size)], in_time)
    if model is not None:
        require_known_model(model)
    try:
        return _find_pretrained(model, size, in_time, download)
    except NotOnHub as error:
        why = error.why
    except NoPretrained as error:
        copy = f"copy {describe_cache_folder(model or SUGGESTED)} from a machine that has it"
        why = f"{f'{model}: ' if model else ''}{error.why}; {copy}"
    return Start(model or SCRATCH, image={"size": size} if size else {}, why_no_weights=why)


def _find_pretrained(model: str | None, size: int | None, in_time: InTime, download: bool | None) -> Start:
    """Return the model, or the best backbone, from the cache or else downloaded; raises NoPretrained."""
    names = [backbone.name for backbone in BACKBONES] if model is None else [model]
    if cached := [name for name in names if find_pretrained(name, download=False) is not None]:
        return _largest_in_time([_pretrained(name, size) for name in cached], in_time)
    require_downloads(model or SUGGESTED, download)  # before anything is measured or asked
    if model is None:
        names = [backbone.name for backbone in BACKBONES if backbone.is_permissive]
    start = _largest_in_time([_pretrained(name, size) for name in names], in_time)
    require_consent(start.model, download)
    find_pretrained(start.model)
    return start


def _largest_in_time(starts: Sequence[Start], in_time: InTime) -> Start:
    """Return the first network for which there is time, at the largest such size, or else the quickest one.

    The smallest size of a network is worth less than another network at its larger sizes.
    """
    if len(starts) == 1 and len(starts[0].sizes) <= 1:
        return starts[0]
    for part in (slice(-1), slice(-1, None)):
        for start in starts:
            sizes = start.sizes[part]
            if not sizes or (len(starts) > 1 and not in_time(start.at_size(sizes[-1]))):
                continue
            for size in sizes:
                if in_time(start.at_size(size)):
                    return start.at_size(size)
    known = [(backbone.gmacs, start) for start in starts if (backbone := find_backbone(start.model)) is not None]
    if not known:
        return starts[0]  # it may be built for its own size only
    _, quickest = min(known, key=lambda one: one[0])
    return quickest.at_size(quickest.sizes[-1])


def _from_file(model: str | None, weights: Path, size: int | None) -> Start:
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
    return _with_sizes(Start(name, weights=str(weights), image=input_settings(name, weights)), size)


def _pretrained(name: str, size: int | None) -> Start:
    return _with_sizes(Start(name, pretrained=True, image=input_settings(name, None)), size)


def _with_sizes(start: Start, size: int | None) -> Start:
    """Add the sizes to choose from: only the given one, or those of the backbone, or some below the network's own."""
    backbone, own = find_backbone(start.model), start.image.get("size")
    if backbone is not None:
        start = replace(start, options=dict(backbone.options))
    sizes: tuple[int, ...]
    if size is not None:
        sizes = (size,)
    elif backbone is not None:
        sizes = backbone.sizes
    else:
        sizes = (own, *(each for each in _SMALLER if each < own)) if own else ()
    return replace(start.at_size(sizes[0]) if sizes else start, sizes=sizes)
