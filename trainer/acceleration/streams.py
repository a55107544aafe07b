"""Exclusive CUDA streams, and CUDA graph captures that may fail without ending the run."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from shards.errors import ConfigError

_DRAWS = 64  # twice what torch has of a priority
_LIVE: "WeakSet[ExclusiveStream]" = WeakSet()
_DRAWING = threading.Lock()
_FAILED: list[torch.cuda.CUDAGraph] = []  # kept alive: torch's allocator of pinned memory still refers to them


class ExclusiveStream:
    """A high-priority stream that no other live instance has; torch hands out the same 32 in rotation.

    A graph refers to the cuBLAS workspace of the stream it was captured on: two graphs of one stream, replayed
    concurrently, would write into each other's. The owner of such a graph must keep this object.
    """

    stream: torch.cuda.Stream

    def __init__(self, device: torch.device) -> None:
        with _DRAWING:
            stream = _find_free_stream(device)
            if stream is None:
                gc.collect()  # finished trainings may still hold theirs
                stream = _find_free_stream(device)
            if stream is None:
                raise ConfigError(
                    "a GPU has streams for about 30 trainings at a time, and all are in use: run fewer at a time "
                    "(--at-once), or set execution.graphs=false"
                )
            self.stream = stream
            _LIVE.add(self)


def _find_free_stream(device: torch.device) -> torch.cuda.Stream | None:
    # No weak references to the streams themselves: in some supported versions of torch they dangle once the stream is
    # gone, and following one crashes the process (pytorch/pytorch#183403).
    taken = {own.stream for own in _LIVE}
    drawn = (torch.cuda.Stream(device, priority=-1) for _ in range(_DRAWS))
    return next((stream for stream in drawn if stream not in taken), None)


class CaptureError(RuntimeError):
    """The work cannot be captured: it syncs with the host, or memory runs out."""


@contextmanager
def capture_graph(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the kernels launched in here, without executing them; raises CaptureError where that is not possible.

    pool: graphs of one pool may read what earlier graphs of it left in memory.
    """
    here, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        with (
            torch.cuda.stream(here),  # a failed capture leaves its own stream current
            # Other threads (decoders, checkpoint writers, NCCL's watchdog) keep using the GPU meanwhile.
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            yield graph
    except RuntimeError as error:
        here.wait_stream(stream)
        _clean_up_capture(graph, stream, pool)
        # Ending such a capture fails too, with a less useful message than the error inside it.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise CaptureError((str(cause) or type(cause).__name__).splitlines()[0]) from error


def _clean_up_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """Release what torch < 2.13 leaves of a failed capture, so that the run can continue without it."""
    graph.reset()
    _FAILED.append(graph)
    # While a capture seems active, the allocator never frees memory that several streams have used.
    with suppress(RuntimeError):  # torch >= 2.13 has done it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # The random generator stays in capture mode until a capture ends: an empty one serves.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)
