"""The bytes of any sample, by offset, from the shards on disk."""

import os
import threading
import zlib
from collections import OrderedDict
from io import FileIO

from shards.errors import DataError
from shards.sample_index import SampleIndex

_SWEEP = 2**17  # a longer wish is cut to the device's read-ahead, often these 128 KiB
_OPEN_SHARDS = 512  # well under the 1024 files that most systems allow a process


class CorruptSample(ValueError):
    """A sample's bytes are not those that were packed."""


class ShardReader:
    """Reads are safe from any thread.

    By pread and not through a memory map: a shard that is cut short or a storage that fails is then an error of
    one sample, where a map would end the whole process (SIGBUS).
    window: of the windowed order, in which all samples of so many shards are wanted soon: a shard is fetched in one
    sweep when its first sample is asked for. None: exactly the samples asked for are fetched.
    """

    def __init__(self, index: SampleIndex, window: int | None = None) -> None:
        self._index, self._window = index, window
        # let go in time, so that the next epoch sweeps again: a step may touch two windows of S and two of C
        self._most_open = _OPEN_SHARDS if window is None else min(_OPEN_SHARDS, 4 * window)
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, sample_id: int) -> bytes:
        """The encoded image; raises CorruptSample where it is not what was packed."""
        data = self.read_or_none(sample_id)
        if data is None:
            path = self._index.shard_path(int(self._index.shard[sample_id]))
            raise CorruptSample(f"sample {sample_id} in {path} is not what was packed: run `incv shards verify`")
        return data

    def read_or_none(self, sample_id: int) -> bytes | None:
        """The encoded image, or None where it is not what was packed."""
        file = self._file(int(self._index.shard[sample_id]))
        nbytes = int(self._index.nbytes[sample_id])
        try:
            data = os.pread(file.fileno(), nbytes, int(self._index.offset[sample_id]))
        except OSError:
            return None
        whole = len(data) == nbytes and zlib.crc32(data) == int(self._index.crc32[sample_id])
        return data if whole else None

    def _file(self, shard: int) -> FileIO:
        """The open shard; the least recently used one is let go, and closed once no thread reads it any more."""
        with self._lock:
            file = self._files.get(shard)
            if file is not None:
                self._files.move_to_end(shard)
                return file
            file = self._files[shard] = self._open(shard)
            if len(self._files) > self._most_open:
                self._files.popitem(last=False)
        if self._window is not None and hasattr(os, "posix_fadvise"):
            for first in range(0, self._index.dataset.shards[shard].nbytes, _SWEEP):
                os.posix_fadvise(file.fileno(), first, _SWEEP, os.POSIX_FADV_WILLNEED)
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
