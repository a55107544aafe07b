"""The data sets that can be packed, by name; one file each."""

from collections.abc import Callable
from pathlib import Path

from shards.errors import ConfigError
from shards.sources.cifar10 import Cifar10
from shards.sources.digits import Digits
from shards.sources.first_classes import first_classes
from shards.sources.ilsvrc12 import Ilsvrc12
from shards.sources.image_folder import ImageFolder
from shards.sources.source import RawSample, Source, did_you_mean
from shards.sources.webvision import WebVision

__all__ = ["SOURCES", "RawSample", "Source", "open_source"]

SOURCES: dict[str, Callable[..., Source]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "ilsvrc12": Ilsvrc12,
    "image_folder": ImageFolder,
    "webvision": WebVision,
}
_WITH_SUBSETS = (WebVision.name,)


def open_source(
    name: str, root: Path | None, split: str, subset: str | None = None, classes: int | None = None
) -> Source:
    """The data set `name` under `root`, or its first `classes` classes; wrong names are refused with near matches."""
    if name not in SOURCES:
        raise ConfigError(f"there is no data set named {name!r}; {did_you_mean(name, SOURCES)}")
    if subset is not None and name not in _WITH_SUBSETS:
        raise ConfigError(f"{name} has no subsets ({', '.join(_WITH_SUBSETS)} has); leave --subset {subset} out")
    source = SOURCES[name](root, split, subset) if name in _WITH_SUBSETS else SOURCES[name](root, split)
    return source if classes is None else first_classes(source, classes)
