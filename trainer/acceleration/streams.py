"""CUDA streams that no other training uses, and graph captures that may fail without ending the run."""

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
_FAILED: list[torch.cuda.CUDAGraph] = []  # torch's allocator of pinned memory still asks them whose turn it is


class ExclusiveStream:
    """A stream of high priority that is no other living one of these; torch hands the same 32 out again and again.

    Graphs remember the scratch memory of cuBLAS, which belongs to the stream they were recorded on: two graphs of one
    stream that are replayed side by side would write into each other's. Whoever has such a graph keeps this.
    """

    stream: torch.cuda.Stream

    def __init__(self, device: torch.device) -> None:
        with _DRAWING:
            stream = _untaken(device)
            if stream is None:
                gc.collect()  # trainings that are over may still hold theirs
                stream = _untaken(device)
            if stream is None:
                raise ConfigError(
                    "a GPU can keep about 30 trainings apart, and so many are under way: run fewer at a time "
                    "(--at-once), or set execution.graphs=false"
                )
            self.stream = stream
            _LIVE.add(self)


def _untaken(device: torch.device) -> torch.cuda.Stream | None:
    # No weak references to the streams: an older torch leaves those of a stream that is gone pointing at
    # nothing, and who follows one ends the process (pytorch/pytorch#183403).
    taken = {own.stream for own in _LIVE}
    drawn = (torch.cuda.Stream(device, priority=-1) for _ in range(_DRAWS))
    return next((stream for stream in drawn if stream not in taken), None)


class CaptureError(RuntimeError):
    """Something cannot be captured: it looks at a number, talks to the host, or has no memory of its own left."""


@contextmanager
def capture_graph(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
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
        # The end of such a capture fails too, and says less than what went wrong inside it.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise CaptureError((str(cause) or type(cause).__name__).splitlines()[0]) from error


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
