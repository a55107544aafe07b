"""How a process comes among the ranks of a run, and how it leaves them."""

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shards.errors import ConfigError
from trainer.config.schema import ExecutionConfig
from trainer.distributed.devices import count_visible_gpus, prepare_gpu
from trainer.distributed.launch import Launch, check_world_size, detect_launch, hostname
from trainer.distributed.rendezvous import agree_on_nonce
from trainer.distributed.stop import StopRequest
from trainer.distributed.watchdog import Watchdog, WorldError, end_soon
from trainer.distributed.world import RankGroup, World

_PAUSE = 0.05
_LONGEST_LEAVING = 20.0
_LONGEST_JOINING = 300.0
"""Seconds for all processes to come; one that cannot read its recipe never will."""


def join_world(execution: ExecutionConfig, stop: StopRequest | None = None) -> World:
    """Set torch up as the execution keys say, and meet the other processes that the launcher started.

    stop: what this process is asked; every rank of the world will know.
    """
    launch = detect_launch()
    check_world_size(launch, execution.world)
    device = select_device(execution, launch.local_rank)
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
        launch.stop_exits_zero,
    )
    if launch.master_address is None:
        world.watchdog.start()
        return world
    return _join_ranks(world, launch, execution, stop or StopRequest())


def select_device(execution: ExecutionConfig, local_rank: int = 0) -> torch.device:
    """Where a process with this number on its node computes."""
    gpus = 0 if execution.device == "cpu" else count_visible_gpus()
    if execution.device == "cuda" and gpus == 0:
        raise ConfigError("execution.device is cuda, and no GPU is visible here: set it to auto or cpu")
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def _join_ranks(world: World, launch: Launch, execution: ExecutionConfig, stop: StopRequest) -> World:
    """Everyone finds the store of rank 0, then each other."""
    long = timedelta(seconds=execution.start_timeout)
    joining = timedelta(seconds=min(execution.start_timeout, _LONGEST_JOINING))
    backend = select_backend(execution, world.device)
    os.environ.update(  # for srun, which does not say it in torch's words
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_size),
        MASTER_ADDR=str(launch.master_address),
        MASTER_PORT=str(launch.master_port),
    )
    try:
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=joining))
        attempt = agree_on_nonce(store, launch.rank, launch.size, joining.total_seconds())
        apart_from_torch = dist.PrefixStore(f"{attempt}/torch", store)
        dist.init_process_group(
            backend, store=apart_from_torch, rank=launch.rank, world_size=launch.size, timeout=long
        )
        ours = dist.PrefixStore(f"{attempt}/incv", store)
        ours.set(f"place/{world.rank}", json.dumps([hostname(), _gpu(world.device)]))
        places = [json.loads(found) for found in ours.multi_get([f"place/{rank}" for rank in range(world.size)])]
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {launch.rank} of {launch.size} could not join the others at "
            f"{launch.master_address}:{launch.master_port}: {error}"
        ) from error
    if backend != "gloo":
        _require_own_gpus(places)
    # The thread has a connection of its own: a store answers one question at a time.
    apart = dist.PrefixStore(f"{attempt}/incv", store.clone())
    wish = stop.local_reason if world.rank == 0 else stop.local_signal
    watchdog = Watchdog(apart, world.rank, [name for name, _ in places], execution.lost_after, wish)
    watchdog.start()
    stop.join(watchdog)
    world = replace(world, watchdog=watchdog)
    return replace(world, rank_group=RankGroup(dist.group.WORLD, ours, "world", _half(world, ours, long)))


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _require_own_gpus(places: list[list[str]]) -> None:
    for rank, place in enumerate(places):
        if place[1] and place in places[:rank]:
            raise ConfigError(
                f"ranks {places.index(place)} and {rank} have the same GPU on {place[0]}: start one process a GPU, "
                "or set execution.backend: gloo to let processes share a GPU (NCCL refuses that)"
            )


def select_backend(execution: ExecutionConfig, device: torch.device) -> str:
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
    rank_group = RankGroup(groups[mine], store, f"half{mine}")
    return replace(world, rank=world.rank % ranks, size=ranks, rank_group=rank_group)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error says that another rank does not answer any more."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket", "store")
    known = (dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


def leave_world(world: World, code: int = 0, seconds: float = 10.0, in_peace: bool = True) -> None:
    """Rank 0, whose process may hold the store, goes last. in_peace: no collective is under way.

    code: of the exit, should the store or the other ranks keep this process from it.
    """
    rank_group = world.rank_group
    world.watchdog.stop()
    if rank_group is None or world.watchdog.store_unreachable:
        return
    timer = end_soon(code, _LONGEST_LEAVING)
    try:
        rank_group.store.add("left", 1)
        limit = time.monotonic() + seconds
        while world.is_rank0 and rank_group.store.add("left", 0) < world.size and time.monotonic() < limit:
            time.sleep(_PAUSE)
        if in_peace:
            dist.destroy_process_group()
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
    finally:
        timer.cancel()


def abort(world: World, message: str, code: int) -> None:
    """After a failure: tell the others, and end this process without waiting for anything they hold."""
    if world.rank_group is None:
        return
    end_soon(code, 2 * _LONGEST_LEAVING)
    try:
        world.watchdog.fail(message, code)
        leave_world(world, code, seconds=3.0, in_peace=False)
    except Exception as error:  # whatever it is: the first failure is the one that counts, and it has been told
        print(f"(leaving: {error})", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
