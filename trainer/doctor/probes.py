"""Tries what a run does on a machine: collectives between the ranks of the launcher in use, loading from shards."""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from shards.errors import ConfigError, InputError
from shards.sample_index import SampleIndex
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.devices import count_visible_gpus
from trainer.distributed.launch import Launch, hostname
from trainer.distributed.process_group import join_world, leave_world, select_backend
from trainer.distributed.watchdog import WorldError
from trainer.distributed.world import World
from trainer.doctor.machine import Finding, count_cores
from trainer.loading.image_set import choose_loader, open_image_set
from trainer.loading.sample_order import mix64

JOIN_SECONDS = 60.0
"""Time limit for all ranks to meet."""
_HANG_SECONDS = 120.0
_ELEMENTS = {"cuda": 2**24, "cpu": 2**20}  # of the float32 tensor whose all-reduce is timed
_TIMES = 5
_NETWORK_FIX = (
    "check that the nodes reach each other (firewall, MASTER_ADDR), and name the network interface with "
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO tells more"
)
_BATCH = 64
_MOST_IMAGES = 50_000
_LOAD_SECONDS = 5.0
_LARGEST_SIDE = 224


def examine_launcher(launch: Launch, gpus: int, environ: Mapping[str, str] = os.environ) -> Finding:
    """Say how to test collectives, in a process that has nobody to talk to."""
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
    world = None
    try:
        world = join_world(ExecutionConfig(start_timeout=JOIN_SECONDS))
        finding = _test_all_reduce(world)
        reports = world.all_gather_strings(json.dumps([asdict(each) for each in (*own, finding)]))
    except (WorldError, ConfigError, RuntimeError) as error:
        fix = "" if isinstance(error, ConfigError) else _NETWORK_FIX
        return [*own, Finding("collective", "problem", str(error).splitlines()[0], fix)]
    finally:
        if world is not None:
            leave_world(world)
        timer.cancel()
    every = [[Finding(**each) for each in json.loads(report)] for report in reports]
    return merge_reports(every) if world.is_rank0 else every[world.rank]


def merge_reports(every: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of rank 0 and, of the other ranks, the notes and problems that rank 0 does not have."""
    merged = {(each.subject, each.level, each.words): each for each in every[0]}
    for rank, findings in enumerate(every[1:], start=1):
        for each in findings:
            if each.level != "ok":
                of_rank = replace(each, words=f"rank {rank}: {each.words}")
                merged.setdefault((each.subject, each.level, each.words), of_rank)
    return list(merged.values())


def _test_all_reduce(world: World) -> Finding:
    """Sum a tensor over all ranks, compare the sum, and time a large one."""
    small = world.all_reduce(torch.full((1000,), float(world.rank + 1), device=world.device))
    expected = world.size * (world.size + 1) / 2
    if not bool((small == expected).all()):
        words = (
            f"all-reduce over {world.size} ranks gives {float(small[0]):g} instead of {expected:g} on {hostname()}"
        )
        return Finding("collective", "problem", words, _NETWORK_FIX)
    tensor = torch.zeros(_ELEMENTS[world.device.type], device=world.device)
    seconds = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        world.all_reduce(tensor)[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    rate = _TIMES * tensor.nbytes / sum(seconds[1:])
    backend = select_backend(ExecutionConfig(), world.device)
    words = f"{world.launcher}, {world.size} ranks, {backend}: all-reduce is right, {rate / 2**20:,.0f} MiB/s"
    return Finding("collective", "ok", words)


def _exit_if_hanging(launch: Launch) -> threading.Timer:
    """Print the finding and exit if a collective blocks: nothing can interrupt it."""

    def give_up() -> None:
        words = f"rank {launch.rank} of {launch.size} on {hostname()} hangs in a collective for {_HANG_SECONDS:.0f} s"
        print(f"problem  collective  {words}\n         fix: {_NETWORK_FIX}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(JOIN_SECONDS + _HANG_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    return timer


def examine_shards(folder: Path, seconds: float = _LOAD_SECONDS) -> Finding:
    """Load images of the whole set in random order for a few seconds; returns the rate, or what is wrong."""
    verify = f"incv shards verify {folder} names the damaged files, and incv shards repair {folder} writes them again"
    try:
        index = SampleIndex.load(folder)
        if not len(index.usable_ids()):
            return Finding(
                "shards", "problem", f"{folder} has no usable image", "look at rejected.csv, and pack again"
            )
        words, images, damaged = _load_images(index, seconds)
    except InputError as error:
        return Finding("shards", "problem", str(error), "pack the images again, or correct the path")
    except (OSError, RuntimeError, ValueError) as error:
        return Finding("shards", "problem", f"{folder} cannot be loaded: {str(error).splitlines()[0]}", verify)
    if damaged:
        return Finding("shards", "problem", f"{folder}: {words}; {damaged:,} of {images:,} are damaged", verify)
    return Finding("shards", "ok", f"{folder}: {words}")


def _load_images(index: SampleIndex, seconds: float) -> tuple[str, int, int]:
    """Return the rate in words, and how many images were loaded and how many of them are damaged."""
    ids = index.usable_ids()
    device = torch.device("cuda" if count_visible_gpus() else "cpu")
    side = int(min(_LARGEST_SIDE, np.median(np.minimum(index.width[ids], index.height[ids]))))
    image, execution = ImageConfig(size=max(side, 1)), ExecutionConfig(workers=count_cores())
    if choose_loader(index, ids, image, execution, device) != "dali":  # a resident loader would read everything first
        execution = execution.model_copy(update={"loader": "cpu"})
    scattered = ids[np.argsort(mix64(ids), kind="stable")][:_MOST_IMAGES]
    images = damaged = 0
    with closing(open_image_set(index, ids, index.label.astype(np.int64), image, execution, device)) as image_set:
        began = time.monotonic()
        requests = image_set.predict_requests(scattered, _BATCH)
        with closing(image_set.loader.batches(requests)) as batches:
            for batch in batches:
                images += int((batch.ids >= 0).sum())
                damaged += len(batch.unreadable)
                if time.monotonic() - began > seconds:
                    break
        rate = images / (time.monotonic() - began)
    loader = "DALI" if execution.loader != "cpu" else f"cpu loader, {execution.workers} threads"
    words = (
        f"{len(ids):,} images; {rate:,.0f} images/s read in random order and decoded to {image.size} x {image.size} "
        f"({loader}, on {device.type})"
    )
    return words, images, damaged
