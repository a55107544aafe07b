"""Exclusive CUDA streams, and CUDA graph captures that may fail without ending the run."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

from shards.errors import ConfigError

_DRAWS = 64  # torch has 32 streams per priority: try each twice
_LIVE: "WeakSet[ExclusiveStream]" = WeakSet()
_DRAWING = threading.Lock()
_FAILED: list[torch.cuda.CUDAGraph] = []  # kept alive: torch's pinned-memory allocator still refers to them


class ExclusiveStream:
    """A high-priority CUDA stream that no other live instance uses (torch hands out the same 32 in rotation).

    A graph uses the cuBLAS workspace of the stream it was captured on. Two graphs captured on the same stream would
    corrupt each other's workspace if replayed concurrently. The owner of a graph must keep this object alive.
    """

    stream: torch.cuda.Stream

    def __init__(self, device: torch.device) -> None:
        with _DRAWING:
            stream = _find_free_stream(device)
            if stream is None:
                gc.collect()  # finished training jobs may still hold theirs
                stream = _find_free_stream(device)
            if stream is None:
                raise ConfigError(
                    "a GPU has enough streams for about 30 concurrent training jobs, and all are in use: run fewer "
                    "at a time (--at-once), or set execution.graphs=false"
                )
            self.stream = stream
            _LIVE.add(self)


def _find_free_stream(device: torch.device) -> torch.cuda.Stream | None:
    # Do not hold weak references to the streams themselves: in some supported torch versions they dangle once the
    # stream is freed, and dereferencing one crashes the process (pytorch/pytorch#183403).
    taken = {own.stream for own in _LIVE}
    drawn = (torch.cuda.Stream(device, priority=-1) for _ in range(_DRAWS))
    return next((stream for stream in drawn if stream not in taken), None)


class CaptureError(RuntimeError):
    """The work cannot be captured in a CUDA graph: it syncs with the host, or memory ran out."""


@contextmanager
def capture_graph(stream: torch.cuda.Stream, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the kernels launched in the body without executing them; raise CaptureError if that is impossible.

    pool: memory pool; a graph may read tensors written by earlier graphs of the same pool.
    """
    here, graph, pool = torch.cuda.current_stream(), torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        with (
            torch.cuda.stream(here),  # restores the current stream, which a failed capture does not
            # thread_local: other threads (decoders, checkpoint writers, NCCL's watchdog) keep using the GPU.
            torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),
        ):
            yield graph
    except RuntimeError as error:
        here.wait_stream(stream)
        _clean_up_capture(graph, stream, pool)
        # Ending a failed capture raises a second error, less informative than the original one.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise CaptureError((str(cause) or type(cause).__name__).splitlines()[0]) from error


def _clean_up_capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """Undo the side effects that a failed capture leaves behind in torch < 2.13, so that the run can continue."""
    graph.reset()
    _FAILED.append(graph)
    # As long as the allocator considers a capture active, it never frees memory that several streams have used.
    with suppress(RuntimeError):  # torch >= 2.13 has already done this
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # The random generator stays in capture mode until some capture ends, so run a trivial one.
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=stream.device)
