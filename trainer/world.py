"""The ranks of a run: who this process is among them, and all they say to each other.

The only module that imports torch.distributed. A world of one without a launcher has no ties, and says nothing.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shards.errors import ConfigError
from trainer.attempt import attempt_name
from trainer.config import ExecutionConfig
from trainer.flat import bytes_of, flat, unflat
from trainer.gpu import gpus_here, prepare_gpu
from trainer.launch import Launch, Launcher, host, recognised, require_promised
from trainer.pulse import Pulse, Store, WorldError, end_soon
from trainer.stop_request import StopRequest

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25
_LONGEST_LEAVING = 20.0
_LONGEST_JOINING = 300.0
"""Seconds for all processes to come; one that cannot read its recipe never will."""


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


def join_world(execution: ExecutionConfig, stop: StopRequest | None = None) -> World:
    """Set torch up as the execution keys say, and meet the other processes that the launcher started.

    stop: what this process is asked; every rank of the world will know.
    """
    launch = recognised()
    require_promised(launch, execution.world)
    device = device_of(execution, launch.local_rank)
    if device.type == "cuda":
        prepare_gpu(device, execution.deterministic)
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    elif launch.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_size))
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only so
        torch.use_deterministic_algorithms(True)
    world = World(
        launch.rank,
        launch.size,
        device,
        torch.get_num_threads(),
        launch.local_rank,
        launch.launcher,
        launch.exit_is_judged_by_marker,
    )
    if launch.address is None:
        world.pulse.begin()
        return world
    return _with_ties(world, launch, execution, stop or StopRequest())


def device_of(execution: ExecutionConfig, local_rank: int = 0) -> torch.device:
    """Where a process with this number on its node computes."""
    gpus = 0 if execution.device == "cpu" else gpus_here()
    if execution.device == "cuda" and gpus == 0:
        raise ConfigError("execution.device is cuda, and no GPU is visible here: set it to auto or cpu")
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def _with_ties(world: World, launch: Launch, execution: ExecutionConfig, stop: StopRequest) -> World:
    """Everyone finds the store of rank 0, then each other."""
    long = timedelta(seconds=execution.start_timeout)
    joining = timedelta(seconds=min(execution.start_timeout, _LONGEST_JOINING))
    backend = backend_of(execution, world.device)
    os.environ.update(  # for srun, which does not say it in torch's words
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_size),
        MASTER_ADDR=str(launch.address),
        MASTER_PORT=str(launch.port),
    )
    try:
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=joining))
        attempt = attempt_name(store, launch.rank, launch.size, joining.total_seconds())
        apart_from_torch = dist.PrefixStore(f"{attempt}/torch", store)
        dist.init_process_group(
            backend, store=apart_from_torch, rank=launch.rank, world_size=launch.size, timeout=long
        )
        ours = dist.PrefixStore(f"{attempt}/incv", store)
        ours.set(f"place/{world.rank}", json.dumps([host(), _gpu(world.device)]))
        places = [json.loads(found) for found in ours.multi_get([f"place/{rank}" for rank in range(world.size)])]
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {launch.rank} of {launch.size} could not meet the others at {launch.address}:{launch.port}: "
            f"{error}"
        ) from error
    if backend != "gloo":
        _require_own_gpus(places)
    # The thread has a connection of its own: a store answers one question at a time.
    apart = dist.PrefixStore(f"{attempt}/incv", store.clone())
    wish = stop.own_reason if world.rank == 0 else stop.own_signal
    pulse = Pulse(apart, world.rank, [name for name, _ in places], execution.lost_after, wish)
    pulse.begin()
    stop.join(pulse)
    world = replace(world, pulse=pulse)
    return replace(world, ties=Ties(dist.group.WORLD, ours, "world", _half(world, ours, long)))


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _require_own_gpus(places: list[list[str]]) -> None:
    for rank, place in enumerate(places):
        if place[1] and place in places[:rank]:
            raise ConfigError(
                f"ranks {places.index(place)} and {rank} have the same GPU on {place[0]}: start one process a GPU, "
                "or set execution.backend: gloo to let processes share a GPU (NCCL refuses that)"
            )


def backend_of(execution: ExecutionConfig, device: torch.device) -> str:
    if device.type == "cpu" or execution.backend == "gloo":
        if execution.backend == "nccl":
            raise ConfigError("execution.backend: nccl needs GPUs; set it to auto or gloo")
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def _half(world: World, store: Any, timeout: timedelta) -> World | None:
    """The group of this rank's fold; every rank takes part in making both groups."""
    if world.size % 2:
        return None
    ranks = world.size // 2
    members = [range(ranks), range(ranks, world.size)]
    groups = [dist.new_group(list(each), timeout=timeout) for each in members]
    mine = world.rank // ranks
    ties = Ties(groups[mine], store, f"half{mine}")
    return replace(world, rank=world.rank % ranks, size=ranks, ties=ties)


def lost_company(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer any more."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket", "store")
    known = (dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def leave(world: World, code: int = 0, seconds: float = 10.0, in_peace: bool = True) -> None:
    """Rank 0, whose process may hold the store, goes last. in_peace: no collective is under way.

    code: of the exit, should the store or the other ranks keep this process from it.
    """
    ties = world.ties
    world.pulse.end()
    if ties is None or world.pulse.cut_off:
        return
    timer = end_soon(code, _LONGEST_LEAVING)
    try:
        ties.store.add("left", 1)
        limit = time.monotonic() + seconds
        while world.is_first and ties.store.add("left", 0) < world.size and time.monotonic() < limit:
            time.sleep(_LONGEST_PAUSE / 5)
        if in_peace:
            dist.destroy_process_group()
    except RuntimeError as error:
        if not lost_company(error):
            raise
    finally:
        timer.cancel()


def abandon(world: World, message: str, code: int) -> None:
    """After a failure: tell the others, and end this process without waiting for anything they hold."""
    if world.ties is None:
        return
    end_soon(code, 2 * _LONGEST_LEAVING)
    try:
        world.pulse.fail(message, code)
        leave(world, code, seconds=3.0, in_peace=False)
    except Exception as error:  # whatever it is: the first failure is the one that counts, and it has been told
        print(f"(leaving: {error})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
