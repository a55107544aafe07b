"""The ranks of a run: who this process is among them, and all they say to each other.

It and joining.py alone import torch.distributed. A world of one without a launcher has no ties, and says nothing.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainer.distributed.flat_tensors import as_bytes, flatten, unflatten
from trainer.distributed.launch import Launcher
from trainer.distributed.watchdog import Store, Watchdog, WorldError

Result = TypeVar("Result")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25


@dataclass(frozen=True)
class RankGroup:
    """What binds a process to the others of its world, or of its fold's group."""

    group: Any
    store: Store
    name: str
    """Of the world or group: their keys in the store start with it."""
    fold_group: "World | None" = None
    """The fold's group of this process, in a world that can be split."""
    sequence: Iterator[int] = field(default_factory=itertools.count)
    """Of the meetings, the same on all ranks since they meet in the same order."""


@dataclass(frozen=True)
class World:
    """One process of `size`."""

    rank: int
    size: int
    device: torch.device
    threads: int
    local_rank: int = 0
    launcher: Launcher = "alone"
    stop_exits_zero: bool = False
    """Whether an agent would take an exit code other than 0 for a crash."""
    rank_group: RankGroup | None = None
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def is_rank0(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group, for DistributedDataParallel; None without ties."""
        return self.rank_group.group if self.rank_group is not None else None

    def fold_group(self) -> "tuple[int, World]":
        """Which of two halves this rank is in, and the group of that half."""
        assert self.rank_group is not None
        assert self.rank_group.fold_group is not None
        return self.rank // (self.size // 2), self.rank_group.fold_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over ranks, in place."""
        if self.rank_group is not None:
            dist.all_reduce(tensor, group=self.rank_group.group)
        return tensor

    def all_reduce_mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Means over ranks, of like floating-point tensors; equal ones come back bit for bit."""
        if self.rank_group is None or not tensors:
            return [tensor.clone() for tensor in tensors]
        sums = self.all_reduce(flatten([tensor.detach().double() for tensor in tensors]))
        means = unflatten(sums.div_(self.size), tensors)
        return [mean.to(like.dtype) for mean, like in zip(means, tensors, strict=True)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, equal in shape and type, by rank."""
        if self.rank_group is None:
            return [tensor]
        # A sum of zeros and one: works on every backend and device, and on bits instead of numbers.
        rows = torch.zeros(self.size, tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
        rows[self.rank] = as_bytes(tensor)
        self.all_reduce(rows)
        return [row.view(tensor.dtype).reshape(tensor.shape) for row in rows]

    def gather_to_rank0(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Every rank's tensor, equal in shape and type, in host memory: [ranks, ...]; None on all but the first."""
        if self.rank_group is None:
            return tensor[None]
        rows = tensor.new_empty(self.size, *tensor.shape) if self.is_rank0 else None
        dist.gather(tensor, None if rows is None else list(rows), group=self.rank_group.group, group_dst=0)
        return rows

    def broadcast_from_rank0(self, value: Callable[[], Any]) -> Any:
        """What the first rank finds, as JSON, for all of them."""
        if self.rank_group is None:
            return value()
        key = f"{self.rank_group.name}/said/{next(self.rank_group.sequence)}"
        if self.is_rank0:
            found = json.dumps(value())
            self.rank_group.store.set(key, found)
            return json.loads(found)
        self._wait(lambda rank_group: rank_group.store.check([key]))
        return json.loads(self.rank_group.store.multi_get([key])[0])

    def run_on_rank0(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on rank 0 while the other ranks wait; returns its result there, None on the others."""
        result = work() if self.is_rank0 else None
        self.broadcast_from_rank0(lambda: None)
        return result

    def all_gather_strings(self, value: str) -> list[str]:
        """What every rank says, by rank."""
        if self.rank_group is None:
            return [value]
        key = f"{self.rank_group.name}/told/{next(self.rank_group.sequence)}"
        self.rank_group.store.set(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(lambda rank_group: rank_group.store.check(keys))
        return [found.decode() for found in self.rank_group.store.multi_get(keys)]

    def barrier(self, wish: bool = False) -> bool:
        """Return once all ranks are here; whether any of them wished (to stop, say).

        Waiting is polling: one rank may come hours after another, and no collective times out.
        """
        if self.rank_group is None:
            return wish
        key = f"{self.rank_group.name}/met/{next(self.rank_group.sequence)}"
        self.rank_group.store.add(f"{key}/wishes", int(wish))
        self.rank_group.store.add(key, 1)
        self._wait(lambda rank_group: rank_group.store.add(key, 0) >= self.size)
        return self.rank_group.store.add(f"{key}/wishes", 0) > 0

    def require_equal(self, value: str, what: str) -> None:
        """All ranks hold the same, or none goes on."""
        every = self.all_gather_strings(value)
        if len(set(every)) > 1:
            raise WorldError(f"{what} differs between ranks: {', '.join(f'{i}: {v}' for i, v in enumerate(every))}")

    def stop_consensus(self, wish: Callable[[], object]) -> "StopConsensus":
        """wish: this rank's, asked before each step; None is none."""
        return StopConsensus(self, wish)

    def set_timeout(self, seconds: float) -> None:
        """From the first step on a collective that takes long has lost someone."""
        if self.rank_group is not None:
            # Its name in torch < 2.12 is the second.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(timedelta(seconds=seconds), self.rank_group.group)

    def _wait(self, ready: Callable[[RankGroup], bool]) -> None:
        assert self.rank_group is not None
        pause = _SHORTEST_PAUSE
        while not ready(self.rank_group):
            self.watchdog.raise_if_failed()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


SINGLE_PROCESS = World(0, 1, torch.device("cpu"), 1)
"""One process on a CPU."""


class StopConsensus:
    """Whether any rank wishes to stop, known to all ranks after the same step."""

    def __init__(self, world: World, wish: Callable[[], object]) -> None:
        self._group, self._wish = world.group, wish
        self._wishes = torch.zeros(1, dtype=torch.int32)
        self._under_way: Any = None

    def post(self) -> None:
        """Before a step: the wish travels while the step is computed."""
        if self._group is not None:
            self._wishes.fill_(int(self._wish() is not None))
            self._under_way = dist.all_reduce(self._wishes, dist.ReduceOp.MAX, self._group, async_op=True)

    def result(self) -> bool:
        """After the step."""
        if self._group is None:
            return self._wish() is not None
        self._under_way.wait()
        return bool(self._wishes.item())
