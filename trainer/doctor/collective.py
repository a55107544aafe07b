"""Tests collectives between the ranks of the launcher in use, and collects what each rank has found."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from shards.errors import ConfigError
from trainer.config.schema import ExecutionConfig
from trainer.distributed.launch import Launch, hostname
from trainer.distributed.process_group import join_world, leave_world, select_backend
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.doctor.finding import Finding

JOIN_SECONDS = 60.0
"""Time limit for all ranks to meet."""
_HANG_SECONDS = 120.0
_SUBJECT = "collective"
_ELEMENTS = {"cuda": 2**24, "cpu": 2**20}  # of the float32 tensor whose all-reduce is timed
_TIMES = 5
_NETWORK_FIX = (
    "check that the nodes reach each other (firewall, MASTER_ADDR), and name the network interface with "
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO tells more"
)


def examine_lone_process(launch: Launch, gpus: int, environ: Mapping[str, str] = os.environ) -> Finding:
    """Say how to test collectives, since a process that no launcher started has nobody to talk to."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if launch.launcher != "srun" and tasks.isdecimal() and int(tasks) > 1:
        words = f"this Slurm job has {tasks} tasks, but srun did not start this process"
        return Finding("launcher", "note", words, "srun python -m trainer doctor")
    if gpus > 1:
        words = f"one process, but {gpus} GPUs: collectives between them were not tested"
        return Finding("launcher", "note", words, f"torchrun --nproc-per-node {gpus} -m trainer doctor")
    return Finding("launcher", "ok", f"{launch.launcher}, one process: no collective to test")


def examine_collectives(launch: Launch, own: Sequence[Finding]) -> list[Finding]:
    """Join the other ranks, test a collective and return the findings of all ranks; on ranks above 0 their own.

    own: what this rank has found so far. A rank that cannot join keeps its findings and adds the reason.
    """
    timer = _exit_if_hanging(launch)
    try:
        world = join_world(ExecutionConfig(start_timeout=JOIN_SECONDS))
    except (WorldError, ConfigError, RuntimeError) as error:
        timer.cancel()
        fix = "" if isinstance(error, ConfigError) else _NETWORK_FIX
        return [*own, Finding(_SUBJECT, "problem", str(error).splitlines()[0], fix)]
    try:
        finding = _test_all_reduce(world)
        reports = world.all_gather_strings(json.dumps([asdict(each) for each in (*own, finding)]))
    except (WorldError, RuntimeError) as error:
        return [*own, Finding(_SUBJECT, "problem", str(error).splitlines()[0], _NETWORK_FIX)]
    finally:
        leave_world(world)
        timer.cancel()
    every = [[Finding(**each) for each in json.loads(report)] for report in reports]
    return merge_reports(every) if world.is_rank0 else every[world.rank]


def merge_reports(every: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of rank 0 and, of the other ranks, the notes and problems that rank 0 does not have."""
    merged = list(every[0])
    known = {(each.subject, each.level, each.words) for each in merged}
    for rank, findings in enumerate(every[1:], start=1):
        for each in findings:
            if each.level != "ok" and (each.subject, each.level, each.words) not in known:
                known.add((each.subject, each.level, each.words))
                merged.append(replace(each, place=each.place or f"rank {rank}"))
    return merged


def _test_all_reduce(world: World) -> Finding:
    """Sum a tensor over all ranks, compare the sum, and time a large one."""
    place = f"rank {world.rank} ({hostname()})"
    backend = select_backend(ExecutionConfig(), world.device)
    small = world.all_reduce(torch.full((1000,), float(world.rank + 1), device=world.device))
    expected = world.size * (world.size + 1) / 2
    if not bool((small == expected).all()):
        words = f"all-reduce over {world.size} ranks gives {float(small[0]):g} instead of {expected:g}"
        return Finding(_SUBJECT, "problem", words, _NETWORK_FIX, place)
    tensor = torch.zeros(_ELEMENTS[world.device.type], device=world.device)
    world.all_reduce(tensor)
    _synchronize(world.device)
    began = time.perf_counter()
    for _ in range(_TIMES):
        world.all_reduce(tensor)
    _synchronize(world.device)
    rate = _TIMES * tensor.numel() * tensor.element_size() / (time.perf_counter() - began)
    words = f"{world.launcher}, {world.size} ranks, {backend}: all-reduce is right, {rate / 2**20:,.0f} MiB/s"
    return Finding(_SUBJECT, "ok", words)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _exit_if_hanging(launch: Launch) -> threading.Timer:
    """Print the finding and exit if a collective blocks: nothing can interrupt it."""

    def give_up() -> None:
        words = f"rank {launch.rank} of {launch.size} on {hostname()} hangs in a collective for {_HANG_SECONDS:.0f} s"
        print(f"problem  {_SUBJECT}  {words}\n         fix: {_NETWORK_FIX}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS + _HANG_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    return timer
