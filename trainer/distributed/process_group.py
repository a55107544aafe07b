"""Join the process group of a run, and leave it normally or after a failure."""

import json
import logging
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
from trainer.distributed.stop import StopRequest
from trainer.distributed.watchdog import Watchdog, WorldError, force_exit_after
from trainer.distributed.world import RankGroup, World

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_MAX_LEAVE_SECONDS = 20.0
_MAX_JOIN_SECONDS = 300.0
"""Time limit for all processes to join; a process that failed to read its recipe never joins."""


def join_world(execution: ExecutionConfig, stop: StopRequest | None = None) -> World:
    """Configure torch from the execution keys and join the other launched processes.

    stop: the stop request of this process; the watchdog shares it with every rank.
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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic cuBLAS
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
    """Choose the device of the process with this local rank."""
    gpus = 0 if execution.device == "cpu" else count_visible_gpus()
    if execution.device == "cuda" and gpus == 0:
        raise ConfigError("execution.device is cuda, but no GPU is visible: set execution.device to auto or cpu")
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def _join_ranks(world: World, launch: Launch, execution: ExecutionConfig, stop: StopRequest) -> World:
    """Connect to the store of rank 0, create the process group and start the watchdog."""
    start_timeout = timedelta(seconds=execution.start_timeout)
    join_timeout = timedelta(seconds=min(execution.start_timeout, _MAX_JOIN_SECONDS))
    backend = select_backend(execution, world.device)
    os.environ.update(  # srun does not set torch's variables
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.size),
        LOCAL_RANK=str(launch.local_rank),
        LOCAL_WORLD_SIZE=str(launch.local_size),
        MASTER_ADDR=str(launch.master_address),
        MASTER_PORT=str(launch.master_port),
    )
    try:
        base_store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=join_timeout))
        nonce = agree_on_nonce(base_store, launch.rank, launch.size, join_timeout.total_seconds())
        torch_store = dist.PrefixStore(f"{nonce}/torch", base_store)
        dist.init_process_group(
            backend, store=torch_store, rank=launch.rank, world_size=launch.size, timeout=start_timeout
        )
        store = dist.PrefixStore(f"{nonce}/incv", base_store)
        store.set(f"location/{world.rank}", json.dumps([hostname(), _gpu_uuid(world.device)]))
        keys = [f"location/{rank}" for rank in range(world.size)]
        locations = [json.loads(found) for found in store.multi_get(keys)]
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"rank {launch.rank} of {launch.size} could not join the others at "
            f"{launch.master_address}:{launch.master_port}: {error}. Check that every rank was started, and that all "
            "nodes can reach this address and port"
        ) from error
    if backend != "gloo":
        _require_distinct_gpus(locations)
    # The watchdog gets its own connection, since a store client handles only one request at a time.
    watchdog_store = dist.PrefixStore(f"{nonce}/incv", base_store.clone())
    get_stop_reason = stop.local_reason if world.rank == 0 else stop.local_signal
    watchdog = Watchdog(
        watchdog_store, world.rank, [host for host, _ in locations], execution.lost_after, get_stop_reason
    )
    watchdog.start()
    stop.attach(watchdog)
    world = replace(world, watchdog=watchdog)
    fold_group = _create_fold_group(world, store, start_timeout)
    return replace(world, rank_group=RankGroup(dist.group.WORLD, store, "world", fold_group))


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _require_distinct_gpus(locations: list[list[str]]) -> None:
    """Raise ConfigError if two ranks use the same GPU. locations: [host, GPU UUID] of each rank."""
    for rank, location in enumerate(locations):
        if location[1] and location in locations[:rank]:
            raise ConfigError(
                f"ranks {locations.index(location)} and {rank} use the same GPU on {location[0]}: start one process "
                "per GPU, or set execution.backend: gloo, which unlike NCCL lets processes share a GPU"
            )


def select_backend(execution: ExecutionConfig, device: torch.device) -> str:
    """Return torch's backend string: gloo for CPU tensors, and NCCL for CUDA tensors unless the recipe says gloo."""
    if device.type == "cpu" or execution.backend == "gloo":
        if execution.backend == "nccl":
            raise ConfigError("execution.backend: nccl needs GPUs; set it to auto or gloo")
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def _create_fold_group(world: World, store: Any, timeout: timedelta) -> World | None:
    """Create the process groups of both folds and return this rank's; None if the world size is odd.

    A collective: every rank must take part in creating both groups.
    """
    if world.size % 2:
        return None
    half = world.size // 2
    members = [range(half), range(half, world.size)]
    groups = [dist.new_group(list(each), timeout=timeout) for each in members]
    own = world.rank // half
    rank_group = RankGroup(groups[own], store, f"half{own}")
    return replace(world, rank=world.rank % half, size=half, rank_group=rank_group)


def is_peer_failure(error: BaseException) -> bool:
    """Whether the error indicates that another rank has stopped responding.

    Subclasses of RuntimeError other than those of torch.distributed have other causes: a compiler's, for example,
    quotes code that may contain any of the words.
    """
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "socket", "store")
    known = (dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, known) or (
        type(error) is RuntimeError and any(word in str(error).lower() for word in words)
    )


def leave_world(world: World, code: int = 0, seconds: float = 10.0, destroy_group: bool = True) -> None:
    """Leave the process group. Rank 0 waits for the others, because its process may host the store.

    code: exit code used if the store or other ranks block this process. seconds: how long rank 0 waits.
    destroy_group: set it to False if a collective may still be in flight.
    """
    rank_group = world.rank_group
    world.watchdog.stop()
    if rank_group is None or world.watchdog.store_unreachable:
        return
    timer = force_exit_after(code, _MAX_LEAVE_SECONDS)
    try:
        rank_group.store.add("left", 1)
        deadline = time.monotonic() + seconds
        while world.is_rank0 and rank_group.store.add("left", 0) < world.size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if destroy_group:
            dist.destroy_process_group()
    except RuntimeError as error:
        if not is_peer_failure(error):
            raise
    finally:
        timer.cancel()


def abort(world: World, message: str, code: int) -> None:
    """Report a failure to the other ranks and exit with `code`; does nothing in a single process."""
    if world.rank_group is None:
        return
    force_exit_after(code, 2 * _MAX_LEAVE_SECONDS)
    try:
        world.watchdog.fail(message, code)
        leave_world(world, code, seconds=3.0, destroy_group=False)
    except Exception as error:  # secondary: the original failure is already reported
        _log.info("ignored error while leaving the process group: %s", error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def agree_on_nonce(store: Any, rank: int, size: int, seconds: float) -> str:
    """Return a nonce shared by the processes of this attempt and by no earlier one.

    The store may still hold the keys of an attempt that died. Rank 0 publishes a nonce; each rank registers a token
    under it; rank 0 confirms with the list of tokens it read. A rank accepts the nonce only once its own token is
    confirmed. Leftovers of an earlier attempt cannot contain that token.
    """
    token = os.urandom(8).hex()
    deadline = time.monotonic() + seconds
    if rank == 0:
        store.set("attempt", token)
        store.set(f"{token}/registered/0", token)
        keys = [f"{token}/registered/{each}" for each in range(size)]
        while not store.check(keys):
            _sleep_or_raise(deadline, "not all ranks joined")
        store.set(f"{token}/confirmed", " ".join(found.decode() for found in store.multi_get(keys)))
        return token
    while True:
        if store.check(["attempt"]):
            nonce = store.get("attempt").decode()
            store.set(f"{nonce}/registered/{rank}", token)
            if store.check([f"{nonce}/confirmed"]) and token in store.get(f"{nonce}/confirmed").decode().split():
                return str(nonce)
        _sleep_or_raise(deadline, "rank 0 did not join")


def _sleep_or_raise(deadline: float, message: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(message)
    time.sleep(_POLL_SECONDS)
