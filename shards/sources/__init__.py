"""The data sets that can be packed: one module each, with a `SOURCE` record that the registry finds.

`source.py` defines the interface of a data set. `registry.py` finds and opens data sets by name, including those of
other installed packages. The other modules are shared: lists of files, tars, folders and WordNet classes.
"""

from shards.sources.registry import find_source, list_sources, open_source, published_size
from shards.sources.source import RawSample, Source, SourceOptions, SourceType

__all__ = [
    "RawSample",
    "Source",
    "SourceOptions",
    "SourceType",
    "find_source",
    "list_sources",
    "open_source",
    "published_size",
]
