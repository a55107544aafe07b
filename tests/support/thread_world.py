"""Ranks that are threads of one process, for code that only uses a world's collectives."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shards.errors import DataError


class ThreadWorld:
    """One of several ranks that are threads of this process."""

    rank_group = "threads"
    device = torch.device("cpu")

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: dict[int, Any]) -> None:
        self.rank, self.size, self._barrier, self._shared = rank, size, barrier, shared

    def all_gather(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value.clone() if isinstance(value, torch.Tensor) else value
        self._barrier.wait()
        every = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait()
        return every

    all_gather_strings = all_gather

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.all_gather(tensor)).sum(dim=0))

    def all_reduce_mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.stack(self.all_gather(tensor)).mean(dim=0) for tensor in tensors]


def on_ranks(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `work` returns, or the error it raises, on each rank."""
    barrier: threading.Barrier = threading.Barrier(size, timeout=20)
    shared: dict[int, Any] = {}

    def one(rank: int) -> Any:
        try:
            return work(ThreadWorld(rank, size, barrier, shared))
        except DataError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
