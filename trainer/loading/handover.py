"""Batches made beside the network's own work: on a CUDA stream of their own, and in a thread where they take long."""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Generic, TypeVar

import torch

from trainer.loading.batch import Batch, Batches

_BATCHES_READY = 2  # made before the network wants them
_LONGEST_TURN = 0.0005  # seconds
_BATCHES_COMPUTING = 4  # handed over, and not yet computed by the GPU

Request = TypeVar("Request")


def beside(make: Callable[[Request], Batch], requests: Iterable[Request], device: torch.device) -> Batches:
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


class Dealt(Generic[Request]):
    """Requests dealt to several lines in turn, whichever line asks first; an error reaches all of them."""

    def __init__(self, requests: Iterable[Request], lines: int) -> None:
        self._requests, self._lines = iter(requests), lines
        self._waiting: list[deque[Request]] = [deque() for _ in range(lines)]
        self._turn = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def to(self, line: int) -> Iterator[Request]:
        while True:
            with self._lock:
                while not self._waiting[line]:
                    if not self._deal():
                        return
                request = self._waiting[line].popleft()
            yield request

    def _deal(self) -> bool:
        """Whether there was another one."""
        if self._error is not None:
            raise self._error
        try:
            request = next(self._requests)
        except StopIteration:
            return False
        except BaseException as error:
            self._error = error
            raise
        self._waiting[self._turn].append(request)
        self._turn = (self._turn + 1) % self._lines
        return True


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


class Feeder:
    """Draws batches a few ahead: each of its lines in a thread and on a CUDA stream of its own, one batch in turn."""

    def __init__(self, lines: Sequence[Batches], device: torch.device) -> None:
        """Lines are drawn from by threads: what they share must bear that."""
        _take_short_turns()
        self._computing, self._closed = _Computing(), threading.Event()
        ready = max(1, _BATCHES_READY // len(lines))
        self._lines = [_Line(batches, ready, device, self._computing, self._closed) for batches in lines]

    def __iter__(self) -> Iterator[Batch]:
        """Until the line whose turn it is has no more."""
        for line in cycle(self._lines):
            batch = line.next()
            if batch is None:
                return
            yield batch
            if batch.images.is_cuda:
                self._computing.launched(batch.images.device)
            del batch  # its memory is wanted

    def close(self) -> None:
        self._closed.set()
        for line in self._lines:
            line.join()


class _Line:
    """A thread that makes batches and puts them where the consumer takes them from."""

    def __init__(
        self,
        batches: Batches,
        ready: int,
        device: torch.device,
        computing: _Computing,
        closed: threading.Event,
    ) -> None:
        """ready: how many are made before the consumer wants them."""
        self._batches, self._computing, self._closed = batches, computing, closed
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException | None] = queue.Queue(ready)
        self._thread = threading.Thread(target=self._draw, name="feed", daemon=True)
        self._thread.start()

    def next(self) -> Batch | None:
        """The next batch, ready on the consumer's stream; None after the last."""
        item = self._ready.get()
        if item is None:
            return None
        if isinstance(item, BaseException):
            raise item
        batch, made = item
        if made is not None:
            _hand_over(batch, made)
        return batch

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

    def join(self) -> None:
        self._thread.join()
