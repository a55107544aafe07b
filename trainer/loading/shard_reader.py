"""Random access to encoded samples, which are read from the shards by offset."""

import os
import threading
import zlib
from collections import OrderedDict
from io import FileIO

from shards.errors import DataError
from shards.sample_index import SampleIndex

_READAHEAD_BYTES = 2**17  # the kernel truncates a longer request to the device's read-ahead, often 128 KiB
_MAX_OPEN_SHARDS = 512  # well below the usual limit of 1024 open files per process


class CorruptSample(ValueError):
    """A sample's bytes differ from those that were packed."""


class ShardReader:
    """Reads samples with pread; thread-safe. With a memory map, a truncated shard or failing storage would kill the
    process (SIGBUS) instead of failing one sample.

    window: number of shards per window of the windowed order, which soon reads every sample of a shard, so the first
    read of a shard prefetches all of it. None: read only the requested samples.
    """

    def __init__(self, index: SampleIndex, window: int | None = None) -> None:
        self._index, self._window = index, window
        # Close shards early enough for the next epoch to prefetch them again, but keep the four windows that a step
        # may touch: two of S and two of C.
        self._max_open = _MAX_OPEN_SHARDS if window is None else min(_MAX_OPEN_SHARDS, 4 * window)
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, sample_id: int) -> bytes:
        """Return the encoded image; raise CorruptSample if it is unreadable or its length or CRC is wrong."""
        data = self.read_or_none(sample_id)
        if data is None:
            path = self._index.shard_path(int(self._index.shard[sample_id]))
            raise CorruptSample(
                f"sample {sample_id} in {path} differs from what was packed: run `incv shards verify`"
            )
        return data

    def read_or_none(self, sample_id: int) -> bytes | None:
        """Return the encoded image, or None if it is unreadable or its length or CRC is wrong."""
        file = self._file(int(self._index.shard[sample_id]))
        nbytes = int(self._index.nbytes[sample_id])
        try:
            data = os.pread(file.fileno(), nbytes, int(self._index.offset[sample_id]))
        except OSError:
            return None
        intact = len(data) == nbytes and zlib.crc32(data) == int(self._index.crc32[sample_id])
        return data if intact else None

    def _file(self, shard: int) -> FileIO:
        """Return the open shard from an LRU cache; an evicted file is closed once no thread references it."""
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                self._files.move_to_end(shard)
                return file
            file = self._files[shard] = self._open(shard)
            if len(self._files) > self._max_open:
                self._files.popitem(last=False)
        if self._window is not None and hasattr(os, "posix_fadvise"):
            for first in range(0, self._index.dataset.shards[shard].nbytes, _READAHEAD_BYTES):
                os.posix_fadvise(file.fileno(), first, _READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return file

    def _open(self, shard: int) -> FileIO:
        path = self._index.shard_path(shard)
        try:
            file = FileIO(path)
        except OSError as error:
            raise DataError(
                f"shard {path} cannot be read ({error}); run `incv shards verify {path.parent}`"
            ) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        return file

    def close(self) -> None:
        with self._lock:
            self._files.clear()
