"""The data sets that can be packed, by name; one file each."""

from collections.abc import Callable
from pathlib import Path

from shards.errors import ConfigError
from shards.sources.cifar10 import Cifar10
from shards.sources.digits import Digits
from shards.sources.image_folder import ImageFolder
from shards.sources.source import RawSample, Source, did_you_mean

__all__ = ["SOURCES", "RawSample", "Source", "open_source"]

SOURCES: dict[str, Callable[[Path | None, str], Source]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "image_folder": ImageFolder,
}


def open_source(name: str, root: Path | None, split: str) -> Source:
    """The data set `name` under `root`; a wrong name or split is refused with near matches."""
    if name not in SOURCES:
        raise ConfigError(f"there is no data set named {name!r}; {did_you_mean(name, SOURCES)}")
    return SOURCES[name](root, split)
