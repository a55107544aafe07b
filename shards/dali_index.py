"""Index files for DALI's own WebDataset reader: `shard-000000.idx` beside `shard-000000.tar`."""

import os
import tarfile
from pathlib import Path

import numpy as np

from shards.durable import write_bytes
from shards.sample_index import SampleIndex

_VERSION = "v1.2"
_NAME_BYTES = 100  # length of the name field, which begins a tar header


def index_path(tar: Path) -> Path:
    return tar.with_suffix(".idx")


def index_text(index: SampleIndex, shard: int) -> str:
    """Return the text of an index file: one line per sample with its suffix, data offset, size and name.

    The name comes from the tar header, the rest from the sample index.
    """
    lines = []
    with index.shard_path(shard).open("rb") as file:
        for row in np.flatnonzero(index.shard == shard):
            offset, size = int(index.offset[row]), int(index.nbytes[row])
            header = os.pread(file.fileno(), _NAME_BYTES, offset - tarfile.BLOCKSIZE)
            name = header.split(b"\0", 1)[0].decode(errors="replace")
            lines.append(f"{name.rpartition('.')[2]} {offset} {size} {name}\n")
    return f"{_VERSION} {len(lines)}\n" + "".join(lines)


def write_dali_index(index: SampleIndex) -> None:
    """Write the index files that are missing or outdated. An empty shard gets none: DALI would reject it."""
    for shard, facts in enumerate(index.dataset.shards):
        if not facts.samples:
            continue
        path = index_path(index.shard_path(shard))
        text = index_text(index, shard).encode()
        if not path.is_file() or path.read_bytes() != text:
            write_bytes(path, text)
