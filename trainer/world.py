"""The ranks of a run: who this process is among them, and all they say to each other.

It and joining.py alone import torch.distributed. A world of one without a launcher has no ties, and says nothing.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.flat import bytes_of, flat, unflat
from trainer.launch import Launcher
from trainer.pulse import Pulse, Store, WorldError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25


@dataclass(frozen=True)
class Ties:
    """What binds a process to the others of its world, or of its fold's group."""

    group: Any
    store: Store
    name: str
    """Of the world or group: their keys in the store start with it."""
    half: "World | None" = None
    """The fold's group of this process, in a world that can be split."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
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
    by_marker: bool = False
    """Whether an agent would take an exit code other than 0 for a crash."""
    ties: Ties | None = None
    pulse: Pulse = field(default_factory=Pulse)

    @property
    def is_first(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    @property
    def group(self) -> Any:
        """The process group, for DistributedDataParallel; None without ties."""
        return self.ties.group if self.ties is not None else None

    def half(self) -> "tuple[int, World]":
        """Which of two halves this rank is in, and the group of that half."""
        assert self.ties is not None
        assert self.ties.half is not None
        return self.rank // (self.size // 2), self.ties.half

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over ranks, in place."""
        if self.ties is not None:
            dist.all_reduce(tensor, group=self.ties.group)
        return tensor

    def mean_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Means over ranks, of like floating-point tensors; equal ones come back bit for bit."""
        if self.ties is None or not tensors:
            return [tensor.clone() for tensor in tensors]
        sums = self.sum_(flat([tensor.detach().double() for tensor in tensors]))
        means = unflat(sums.div_(self.size), tensors)
        return [mean.to(like.dtype) for mean, like in zip(means, tensors, strict=True)]

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, equal in shape and type, by rank."""
        if self.ties is None:
            return [tensor]
        # A sum of zeros and one: works on every backend and device, and on bits instead of numbers.
        rows = torch.zeros(self.size, tensor.numel() * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
        rows[self.rank] = bytes_of(tensor)
        self.sum_(rows)
        return [row.view(tensor.dtype).reshape(tensor.shape) for row in rows]

    def gathered_by_first(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Every rank's tensor, equal in shape and type, in host memory: [ranks, ...]; None on all but the first."""
        if self.ties is None:
            return tensor[None]
        rows = tensor.new_empty(self.size, *tensor.shape) if self.is_first else None
        dist.gather(tensor, None if rows is None else list(rows), group=self.ties.group, group_dst=0)
        return rows

    def share(self, value: Callable[[], Any]) -> Any:
        """What the first rank finds, as JSON, for all of them."""
        if self.ties is None:
            return value()
        key = f"{self.ties.name}/said/{next(self.ties.numbers)}"
        if self.is_first:
            found = json.dumps(value())
            self.ties.store.set(key, found)
            return json.loads(found)
        self._wait(lambda ties: ties.store.check([key]))
        return json.loads(self.ties.store.multi_get([key])[0])

    def told(self, value: str) -> list[str]:
        """What every rank says, by rank."""
        if self.ties is None:
            return [value]
        key = f"{self.ties.name}/told/{next(self.ties.numbers)}"
        self.ties.store.set(f"{key}/{self.rank}", value)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._wait(lambda ties: ties.store.check(keys))
        return [found.decode() for found in self.ties.store.multi_get(keys)]

    def meet(self, wish: bool = False) -> bool:
        """Return once all ranks are here; whether any of them wished (to stop, say).

        Waiting is polling: one rank may come hours after another, and no collective times out.
        """
        if self.ties is None:
            return wish
        key = f"{self.ties.name}/met/{next(self.ties.numbers)}"
        self.ties.store.add(f"{key}/wishes", int(wish))
        self.ties.store.add(key, 1)
        self._wait(lambda ties: ties.store.add(key, 0) >= self.size)
        return self.ties.store.add(f"{key}/wishes", 0) > 0

    def require_equal(self, value: str, what: str) -> None:
        """All ranks hold the same, or none goes on."""
        every = self.told(value)
        if len(set(every)) > 1:
            raise WorldError(f"{what} differs between ranks: {', '.join(f'{i}: {v}' for i, v in enumerate(every))}")

    def agreement(self, wish: Callable[[], object]) -> "Agreement":
        """wish: this rank's, asked before each step; None is none."""
        return Agreement(self, wish)

    def shorten_timeout(self, seconds: float) -> None:
        """From the first step on a collective that takes long has lost someone."""
        if self.ties is not None:
            # Its name in torch < 2.12 is the second.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(timedelta(seconds=seconds), self.ties.group)

    def _wait(self, ready: Callable[[Ties], bool]) -> None:
        assert self.ties is not None
        pause = _SHORTEST_PAUSE
        while not ready(self.ties):
            self.pulse.require_well()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


ALONE = World(0, 1, torch.device("cpu"), 1)
"""One process on a CPU."""


class Agreement:
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
