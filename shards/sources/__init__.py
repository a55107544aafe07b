"""The data sets that can be packed: one file each, ending in a `SOURCE` record that the registry finds.

`source.py` says what a data set has to offer, `registry.py` finds and opens one by name, also those of other
installed packages. The other files are shared: lists of files, tars, folders and WordNet classes.
"""

from shards.sources.registry import find_source, list_sources, open_source, published_size
from shards.sources.source import RawSample, Source, SourceType

__all__ = ["RawSample", "Source", "SourceType", "find_source", "list_sources", "open_source", "published_size"]
