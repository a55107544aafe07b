"""What a process asks of its GPU: how it is set up, streams that nobody else uses, captures that may fail."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

_DRAWS = 64  # twice what torch has of a priority
_LIVE: "WeakSet[torch.cuda.Stream]" = WeakSet()
_FAILED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory still asks them whose turn it is


def prepare_gpu(device: torch.device, deterministic: bool = False) -> None:
    """Before its memory is first used."""
    # CUDA graphs keep their memory: without this, a seventh of it is gaps between pieces.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not deterministic  # shapes are fixed: a search pays at once


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority that is no other living one of these; torch hands the same 32 out again and again.

    Graphs remember the scratch memory of cuBLAS, which belongs to the stream they were recorded on: two graphs of one
    stream that are replayed side by side would write into each other's.
    """
    for _ in range(_DRAWS):
        stream = torch.cuda.Stream(device, priority=-1)
        if stream not in _LIVE:
            break
    _LIVE.add(stream)
    return stream


class CannotRecord(RuntimeError):
    """Something cannot be captured: it looks at a number, or talks to the host."""


@contextmanager
def capturing(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """What is launched in here is recorded in the graph, not executed; CannotRecord where that is not possible.

    pool: graphs of one pool may read what the ones before them left in memory.
    """
    here, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        with (
            torch.cuda.stream(here),  # a capture that fails leaves its own behind
            # Other threads (decoders, checkpoint writers, NCCL's watchdog) go on using the GPU meanwhile.
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            yield graph
    except RuntimeError as error:
        here.wait_stream(stream)
        _clear_up(graph, stream, pool)
        if isinstance(error, torch.OutOfMemoryError):
            raise
        # The end of such a capture fails too, and says less than what went wrong inside it.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise CannotRecord((str(cause) or type(cause).__name__).splitlines()[0]) from error


def _clear_up(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """What torch before 2.13 leaves of a capture that failed, so that the run can go on without it."""
    graph.reset()
    _FAILED.append(graph)
    # While one seems to be under way, memory that several streams used is never free again.
    with suppress(RuntimeError):  # torch did it itself
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # The random numbers wait for the end of a capture before they are drawn again: that of an empty one will do.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)
