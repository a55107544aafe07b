"""Every known data set by name: the modules of this folder, and the entry points of other installed packages."""

import importlib
import logging
import pkgutil
from functools import cache
from pathlib import Path

from shards.errors import ConfigError, did_you_mean
from shards.plugins import PluginGroup
from shards.sources.source import Source, SourceOptions, SourceType, select_first_classes

NO_OPTIONS = SourceOptions()
PLUGINS = PluginGroup("incv.sources", "data set")


def find_source(name: str) -> SourceType:
    """The record of the data set `name`; an unknown name is refused with near matches."""
    built_in = _built_in_sources()
    entry = PLUGINS.find(name, built_in)
    if entry is not None:
        return PLUGINS.load(entry, SourceType)
    if name not in built_in:
        known = [source.name for source in list_sources()]
        raise ConfigError(f"there is no data set named {name!r}; {did_you_mean(name, known)}")
    return built_in[name]


def list_sources() -> list[SourceType]:
    """All usable data sets, by name; one that `find_source` would refuse is skipped with a warning."""
    sources = []
    for name in sorted({*_built_in_sources(), *PLUGINS.names()}):
        try:
            sources.append(find_source(name))
        except ConfigError as error:
            logging.getLogger(__name__).warning("the data set %s is skipped: %s", name, error)
    return sources


def open_source(
    name: str,
    root: Path | None,
    split: str,
    subset: str | None = None,
    classes: int | None = None,
    options: SourceOptions = NO_OPTIONS,
) -> Source:
    """The data set `name` under `root`, or its first `classes` classes."""
    kind = find_source(name)
    for option in options.given():
        if option not in kind.options:
            others = ", ".join(one.name for one in list_sources() if option in one.options)
            raise ConfigError(f"{name} has no such option (only {others})", field=option, fix="leave it out")
    if subset is not None and not kind.subsets:
        others = ", ".join(one.name for one in list_sources() if one.subsets)
        raise ConfigError(f"{name} has no subsets (only {others})", field="subset", fix="leave it out")
    chosen = {option: getattr(options, option) for option in kind.options}
    source = kind.open(root, split, *([subset] if kind.subsets else []), **chosen)
    return source if classes is None else select_first_classes(source, classes)


def published_size(
    name: str, split: str, subset: str | None = None, classes: int | None = None
) -> tuple[int, int] | None:
    """(samples, classes) of a split, or of its first `classes` classes, by its publisher; None where unknown.

    Where the size of those classes is not known they are taken to be of equal size.
    """
    try:
        kind = find_source(name)
    except ConfigError:
        return None
    whole = subset or "all"
    if (split, whole) not in kind.published:
        return None
    samples, known = kind.published[split, whole]
    if classes is None or classes >= known:
        return samples, known
    return kind.published_parts.get((split, whole, classes), samples * classes // known), classes


@cache
def _built_in_sources() -> dict[str, SourceType]:
    """The `SOURCE` of every module of this folder that has one."""
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    modules = [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder)]
    records = [module.SOURCE for module in modules if hasattr(module, "SOURCE")]
    return {record.name: record for record in records}
