"""`World`: this process's rank, and the collectives over all ranks.

A single process without a launcher has no `RankGroup`; its collectives return their input.
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

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.002, 0.25


@dataclass(frozen=True)
class RankGroup:
    """The process group and store that connect the ranks of a world, or the ranks that train one fold."""

    group: Any
    store: Store
    name: str
    """Prefix of this group's keys in the store."""
    fold_group: "World | None" = None
    """This rank's half of the world, for training two folds at once; None if the world size is odd."""
    sequence: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the collectives that use the store. All ranks call them in the same order, so the numbers match."""


@dataclass(frozen=True)
class World:
    """This process's rank and device among the `size` ranks of a run, and the collectives over those ranks."""

    rank: int
    size: int
    device: torch.device
    threads: int
    local_rank: int = 0
    launcher: Launcher = "alone"
    stop_exits_zero: bool = False
    """Whether a stop must exit with code 0, because the launcher's agent treats any other code as a crash."""
    rank_group: RankGroup | None = None
    watchdog: Watchdog = field(default_factory=Watchdog)

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which writes the run's files."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group, for DistributedDataParallel; None in a single process."""
        return self.rank_group.group if self.rank_group is not None else None

    def fold_group(self) -> "tuple[int, World]":
        """Return the index (0 or 1) of this rank's half of the world, and that half as a World."""
        assert self.rank_group is not None
        assert self.rank_group.fold_group is not None
        return self.rank // (self.size // 2), self.rank_group.fold_group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over all ranks, in place, and return it."""
        if self.rank_group is not None:
            dist.all_reduce(tensor, group=self.rank_group.group)
        return tensor

    def all_reduce_mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the mean over ranks of floating-point tensors; exact for tensors that are equal on all ranks."""
        if self.rank_group is None or not tensors:
            return [tensor.clone() for tensor in tensors]
        sums = self.all_reduce(flatten([tensor.detach().double() for tensor in tensors]))
        means = unflatten(sums.div_(self.size), tensors)
        return [mean.to(like.dtype) for mean, like in zip(means, tensors, strict=True)]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, ordered by rank; shape and dtype must be equal on all ranks."""
        if self.rank_group is None:
            return [tensor]
        if tensor.is_cuda and dist.get_backend(self.rank_group.group) == "gloo":  # it gathers in host memory only
            return [row.to(tensor.device) for row in self.all_gather(tensor.cpu())]
        # As bytes, which every backend gathers. torch < 2.13 has only the longer name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        rows = tensor.new_empty(self.size, tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        gather(rows.view(-1), as_bytes(tensor), group=self.rank_group.group)
        return [row.view(tensor.dtype).reshape(tensor.shape) for row in rows]

    def gather_to_rank0(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensors of all ranks, [ranks, ...], on rank 0 and None on the others.

        The tensors must be in host memory and of equal shape.
        """
        if self.rank_group is None:
            return tensor[None]
        rows = tensor.new_empty(self.size, *tensor.shape) if self.is_rank0 else None
        dist.gather(tensor, None if rows is None else list(rows), group=self.rank_group.group, group_dst=0)
        return rows

    def broadcast_from_rank0(self, value: Callable[[], Any]) -> Any:
        """Call `value` on rank 0 only, and return its result on every rank, after a round trip through JSON."""
        if self.rank_group is None:
            return json.loads(json.dumps(value()))
        key = f"{self.rank_group.name}/broadcast/{next(self.rank_group.sequence)}"
        if self.is_rank0:
            text = json.dumps(value())
            self.rank_group.store.set(key, text)
            return json.loads(text)
        self._wait(lambda rank_group: rank_group.store.check([key]))
        return json.loads(self.rank_group.store.multi_get([key])[0])

    def run_on_rank0(self, work: Callable[[], Result]) -> Result | None:
        """Run `work` on rank 0 while the other ranks wait; return its result on rank 0 and None on the others."""
        result = work() if self.is_rank0 else None
        self.broadcast_from_rank0(lambda: None)
        return result

    def all_gather_strings(self, value: str) -> list[str]:
        """Return every rank's string, ordered by rank."""
        if self.rank_group is None:
            return [value]
        key = f"{self.rank_group.name}/gather/{next(self.rank_group.sequence)}"
        self.rank_group.store.set(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(lambda rank_group: rank_group.store.check(keys))
        return [found.decode() for found in self.rank_group.store.multi_get(keys)]

    def barrier(self, flag: bool = False) -> bool:
        """Wait for all ranks, then return whether any of them set `flag` (for example, for a stop request).

        The barrier polls the store and has no timeout, because one rank may arrive hours after another.
        """
        if self.rank_group is None:
            return flag
        key = f"{self.rank_group.name}/barrier/{next(self.rank_group.sequence)}"
        self.rank_group.store.add(f"{key}/flags", int(flag))
        self.rank_group.store.add(key, 1)
        self._wait(lambda rank_group: rank_group.store.add(key, 0) >= self.size)
        return self.rank_group.store.add(f"{key}/flags", 0) > 0

    def require_equal(self, value: str, what: str) -> None:
        """Raise WorldError on all ranks unless they hold the same value. what: name of the value in the message."""
        every = self.all_gather_strings(value)
        if len(set(every)) > 1:
            raise WorldError(
                f"{what} differs between ranks: {', '.join(f'{i}: {v}' for i, v in enumerate(every))}. Check that "
                "all nodes have the same versions and see the same files, then run the same command again"
            )

    def stop_consensus(self, stop_reason: Callable[[], object]) -> "StopConsensus":
        """Create a StopConsensus. stop_reason: called before each step; returns this rank's reason or None."""
        return StopConsensus(self, stop_reason)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives. Used after the first step, when a slow collective means a lost rank."""
        if self.rank_group is not None:
            # torch < 2.12 has only the private name.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(timedelta(seconds=seconds), self.rank_group.group)

    def _wait(self, ready: Callable[[RankGroup], bool]) -> None:
        assert self.rank_group is not None
        seconds = _MIN_POLL_SECONDS
        while not ready(self.rank_group):
            self.watchdog.raise_if_failed()
            time.sleep(seconds)
            seconds = min(2 * seconds, _MAX_POLL_SECONDS)


SINGLE_PROCESS = World(0, 1, torch.device("cpu"), 1)
"""The world of a single process on the CPU."""


class StopConsensus:
    """Lets all ranks agree, after the same step, on whether any of them wants to stop.

    The all-reduce is asynchronous and overlaps with the step.
    """

    def __init__(self, world: World, stop_reason: Callable[[], object]) -> None:
        self._group, self._stop_reason = world.group, stop_reason
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Any = None

    def post(self) -> None:
        """Start the all-reduce of this rank's stop flag; call this before the step."""
        if self._group is not None:
            self._flag.fill_(int(self._stop_reason() is not None))
            self._pending = dist.all_reduce(self._flag, dist.ReduceOp.MAX, self._group, async_op=True)

    def result(self) -> bool:
        """Return whether any rank wants to stop; call this after the step."""
        if self._group is None:
            return self._stop_reason() is not None
        self._pending.wait()
        return bool(self._flag.item())
