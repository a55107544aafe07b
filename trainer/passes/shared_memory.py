"""One copy of a large table for all ranks of a host: each writes its own rows to shared memory, and all map it."""

import os
import uuid
from pathlib import Path

import numpy as np
import torch

from trainer.distributed.world import World

_FOLDER = Path("/dev/shm")
WORTH_SHARING = 2**26
"""Bytes of a table below which gloo is as fast."""


class SharedMemory:
    """Memory that all ranks write to, and then read privately; freed with the last mapping, however a rank ends."""

    def __init__(self, world: World, nbytes: int) -> None:
        """Reserve the memory; a collective. `usable` is false on several hosts, or if memory is short."""
        self._world, self._nbytes = world, nbytes
        path = Path(world.broadcast_from_rank0(lambda: str(_FOLDER / f"incv-{uuid.uuid4().hex}")))
        if world.is_rank0:
            self._file = _open(path, os.O_CREAT | os.O_EXCL)
        world.barrier()
        if not world.is_rank0:
            self._file = _open(path, 0)  # fails on another host
        self.usable = not world.barrier(self._file is None)
        if world.is_rank0:
            path.unlink(missing_ok=True)
        if self.usable:
            self.usable = not world.barrier(not self._reserve())

    def _reserve(self) -> bool:
        """Reserve this rank's share of the pages: without it, a write beyond the free memory would be a SIGBUS."""
        assert self._file is not None
        first, last = (self._nbytes * rank // self._world.size for rank in (self._world.rank, self._world.rank + 1))
        try:
            os.ftruncate(self._file, self._nbytes)
            os.posix_fallocate(self._file, first, max(last - first, 1))
        except OSError:
            return False
        return True

    def map(self, shape: tuple[int, int], dtype: torch.dtype, private: bool) -> torch.Tensor:
        """Map the memory as a tensor. private: what is written to the tensor is seen by this rank alone."""
        assert self._file is not None
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        with os.fdopen(os.dup(self._file), "r+b") as file:
            return torch.from_numpy(np.memmap(file, kind, "c" if private else "r+", shape=shape))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _open(path: Path, flags: int) -> int | None:
    try:
        return os.open(path, os.O_RDWR | flags, 0o600)
    except OSError:
        return None
