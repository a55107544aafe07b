"""The bytes of any sample, by offset, from memory-mapped shards."""

import mmap
import threading
import zlib

from shards.errors import DataError
from shards.sample_index import SampleIndex


class ChangedBytes(Exception):
    """A sample's bytes are not those that were packed."""


class ShardReader:
    """Maps each shard once; reads are copies of a slice and safe from any thread."""

    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def read(self, sample_id: int) -> bytes:
        """The encoded image; raises ChangedBytes where it is not what was packed."""
        shard = int(self._index.shard[sample_id])
        offset, nbytes = int(self._index.offset[sample_id]), int(self._index.nbytes[sample_id])
        data = self._map(shard)[offset : offset + nbytes]
        if len(data) != nbytes or zlib.crc32(data) != int(self._index.crc32[sample_id]):
            raise ChangedBytes(f"sample {sample_id} in {self._index.shard_path(shard)}")
        return data

    def _map(self, shard: int) -> mmap.mmap:
        with self._lock:
            if shard not in self._maps:
                path = self._index.shard_path(shard)
                try:
                    with path.open("rb") as file:
                        self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError) as error:
                    raise DataError(
                        f"shard {path} cannot be read ({error}); run `incv shards verify {path.parent}`"
                    ) from error
            return self._maps[shard]

    def close(self) -> None:
        for shard in self._maps.values():
            shard.close()
        self._maps.clear()
