"""Batches made beside the network's own work: on a CUDA stream of their own, and in a thread where they take long."""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

import torch

from trainer.loading.batch import Batch, Batches

_BATCHES_READY = 2  # made before the network wants them
_LONGEST_TURN = 0.0005  # seconds
_BATCHES_COMPUTING = 4  # handed over, and not yet computed by the GPU

Request = TypeVar("Request")


def make_batches(make: Callable[[Request], Batch], requests: Iterable[Request], device: torch.device) -> Batches:
    """Batches that take the host next to no time, made when they are asked for, while the GPU still computes."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    computing = _Computing()
    for request in requests:
        if stream is None:
            yield make(request)
            continue
        with torch.cuda.stream(stream):
            batch = make(request)
            made = stream.record_event()
        _hand_over(batch, made)
        yield batch
        computing.launched(device)
        computing.pace()


class _Computing:
    """Batches that were handed over and that the GPU has not computed yet. They are memory: not too many of them."""

    def __init__(self) -> None:
        self._ends: deque[torch.cuda.Event] = deque()

    def launched(self, device: torch.device) -> None:
        """Whoever comes back for the next batch has launched all its work on the last one."""
        self._ends.append(torch.cuda.current_stream(device).record_event())

    def pace(self) -> None:
        """Wait where the host has run far ahead; the GPU has work for several batches meanwhile."""
        while len(self._ends) > _BATCHES_COMPUTING:
            self._ends.popleft().synchronize()


def _hand_over(batch: Batch, made: torch.cuda.Event) -> None:
    """The consumer's stream waits for the batch; its memory is not reused before that stream is done with it."""
    stream = torch.cuda.current_stream(batch.images.device)
    stream.wait_event(made)
    for tensor in (batch.ids, batch.images, batch.labels, batch.weights):
        tensor.record_stream(stream)


def _take_short_turns() -> None:
    """Threads that read and feed hold the interpreter for up to 5 ms; the loop, which wants it back after each of its
    launches, would lose a step's time to that."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _LONGEST_TURN))


class PrefetchThread:
    """Draws batches in a thread of its own, a few ahead, on a CUDA stream of its own."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        _take_short_turns()
        self._batches = batches
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException | None] = queue.Queue(
            _BATCHES_READY
        )
        self._computing, self._closed = _Computing(), threading.Event()
        self._thread = threading.Thread(target=self._draw, name="feed", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batch, made = item
            del item
            if made is not None:
                _hand_over(batch, made)
            yield batch
            if made is not None:
                self._computing.launched(batch.images.device)
            del batch  # its memory is wanted

    def _draw(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for batch in self._batches:
                    self._computing.pace()
                    if not self._put((batch, self._stream.record_event() if self._stream is not None else None)):
                        break
            self._put(None)
        except BaseException as error:  # it belongs to the consumer
            self._put(error)
        finally:
            self._batches.close()

    def _put(self, item: tuple[Batch, torch.cuda.Event | None] | BaseException | None) -> bool:
        """Whether the consumer still wants more."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
