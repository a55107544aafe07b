"""Overlap loading with compute: on a side CUDA stream, and in a background thread for loaders that need host time."""

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch

from trainer.loading.batch import Batch, Batches

_PREFETCHED_BATCHES = 2  # batches ready ahead of the consumer
_SWITCH_INTERVAL = 0.0005  # seconds
_MAX_IN_FLIGHT = 4  # batches handed to the consumer that the GPU has not finished processing
_MAX_GROUPS_IN_FLIGHT = 1

Request = TypeVar("Request")


def make_batches(
    make: Callable[[Sequence[Request]], list[Batch]], groups: Iterable[Sequence[Request]], device: torch.device
) -> Batches:
    """Make the batches of each group of requests when its first one is asked for, on a side stream while the GPU
    still computes; `make` must need little host time."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    back_pressure = _BackPressure(_MAX_GROUPS_IN_FLIGHT)
    for requests in groups:
        if stream is None:
            yield from make(requests)
            continue
        back_pressure.wait()
        with torch.cuda.stream(stream):
            batches = make(requests)
            ready = stream.record_event()
        _hand_over(batches, ready)
        while batches:  # a batch that the consumer has dropped is freed
            yield batches.pop(0)
        back_pressure.record_launched(device)


class _BackPressure:
    """Limits how much is in flight (handed over, but not yet finished by the GPU), and so the memory of batches."""

    def __init__(self, most: int = _MAX_IN_FLIGHT) -> None:
        self._most = most
        self._finished: deque[torch.cuda.Event] = deque()

    def record_launched(self, device: torch.device) -> None:
        """Record that the consumer has launched all work on what it was handed; call it when it asks for more."""
        self._finished.append(torch.cuda.current_stream(device).record_event())

    def wait(self) -> None:
        """Block while too much is in flight; the GPU stays busy with the work already queued."""
        while len(self._finished) > self._most:
            self._finished.popleft().synchronize()


def _hand_over(batches: Sequence[Batch], ready: torch.cuda.Event) -> None:
    """Make the consumer's stream wait for the batches, and keep their memory until that stream is done."""
    stream = torch.cuda.current_stream(batches[0].images.device)
    stream.wait_event(ready)
    tensors = (tensor for batch in batches for tensor in batch.tensors())
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values():
        tensor.record_stream(stream)


def _shorten_gil_switch_interval() -> None:
    """Make Python threads hand over the GIL sooner than after the default 5 ms. The training loop needs the GIL back
    after every kernel launch, and would otherwise lose a step's time to the reading threads."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))


class PrefetchThread:
    """Iterates over `batches` in a background thread, on its own CUDA stream, a few batches ahead of the consumer."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        _shorten_gil_switch_interval()
        self._batches = batches
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.Queue[tuple[Batch, torch.cuda.Event | None] | BaseException | None] = queue.Queue(
            _PREFETCHED_BATCHES
        )
        self._back_pressure, self._closed = _BackPressure(), threading.Event()
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batch, ready = item
            del item
            if ready is not None:
                _hand_over([batch], ready)
            yield batch
            if ready is not None:
                self._back_pressure.record_launched(batch.images.device)
            del batch  # frees its memory

    def _produce(self) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for batch in self._batches:
                    self._back_pressure.wait()
                    if not self._put((batch, self._stream.record_event() if self._stream is not None else None)):
                        break
            self._put(None)
        except BaseException as error:  # re-raised in the consumer
            self._put(error)
        finally:
            self._batches.close()

    def _put(self, item: tuple[Batch, torch.cuda.Event | None] | BaseException | None) -> bool:
        """Enqueue an item for the consumer; return False if the consumer has called `close`."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
