"""Decodes JPEG and PNG shards of any size with a pool of threads (the decoders release the GIL)."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from shards.image_check import UndecodableImage
from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry
from trainer.loading.batch import Batch, Batches, BatchRequest, assemble_batch, select_rows
from trainer.loading.pixels import Normalise, Pixels, cut, decode
from trainer.loading.prefetch import PrefetchThread
from trainer.loading.shard_reader import ShardReader

_BATCHES_AHEAD = 2  # a worker, so that the network never waits for one slow image


class CpuLoader:
    """One batch is one thread's work; batches come out in the order they were asked for."""

    def __init__(
        self,
        index: SampleIndex,
        geometry: Geometry,
        normalise: Normalise,
        device: torch.device,
        workers: int,
        window: int | None = None,
    ) -> None:
        self._reader = ShardReader(index, window)
        self._geometry, self._normalise, self._device = geometry, normalise, device
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")

    def batches(self, requests: Iterable[BatchRequest]) -> Batches:
        if self._device.type == "cpu":
            yield from self._decoded(requests)
            return
        with closing(PrefetchThread(self._decoded(requests), self._device)) as feeder:
            yield from feeder

    def _decoded(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        waiting: deque[tuple[BatchRequest, Future[tuple[torch.Tensor, npt.NDArray[np.int64]]]]] = deque()
        remaining = iter(requests)
        try:
            for request in islice(remaining, self._workers * _BATCHES_AHEAD):
                waiting.append((request, self._pool.submit(self._decode, request)))
            while waiting:
                request, decoding = waiting.popleft()
                pictures, failed = decoding.result()
                for following in islice(remaining, 1):
                    waiting.append((following, self._pool.submit(self._decode, following)))
                yield assemble_batch(request, failed, partial(self._show, pictures), self._device)
        finally:
            for _, decoding in waiting:
                decoding.cancel()

    def _decode(self, request: BatchRequest) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Pictures of the request's rows, [n, size, size, 3], and the numbers of rows that cannot be decoded.

        Normalised here where they stay on the CPU: the picture is still in the cache, and the threads share the work.
        """
        encoded = (self._reader.read_or_none(int(sample)) for sample in request.ids)
        normalise = self._normalise if self._normalise.fits_cpu else None
        pictures, failed = decode_rows(request, encoded, self._geometry, normalise)
        return torch.from_numpy(pictures), failed

    def _show(self, pictures: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        shown = select_rows(pictures, rows)
        if self._normalise.fits_cpu:
            return shown.permute(0, 3, 1, 2)
        if self._device.type == "cuda":
            shown = shown.pin_memory()
        return self._normalise(shown.to(self._device, non_blocking=True))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


def decode_rows(
    request: BatchRequest,
    images: Iterable[bytes | None],
    geometry: Geometry,
    normalise: Normalise | None = None,
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """The request's rows, [n, size, size, 3], and the numbers of those that cannot be decoded (or are None): black.

    uint8, or float32 where `normalise` is given.
    """
    shape = (geometry.size, geometry.size, 3)
    pictures = np.empty((len(request.ids), *shape), np.uint8 if normalise is None else np.float32)
    failed = []
    for row, piece in enumerate(_pieces(request, images, geometry)):
        if piece is None:
            failed.append(row)
            piece = np.zeros(shape, np.uint8)
        if normalise is None:
            pictures[row] = piece
        else:
            normalise.write(piece, pictures[row])
    return pictures, np.asarray(failed, np.int64)


def _pieces(request: BatchRequest, images: Iterable[bytes | None], geometry: Geometry) -> Iterator[Pixels | None]:
    for data, box, flip in zip(images, request.boxes, request.flips, strict=True):
        try:
            yield cut(decode(data or b""), box, flip, geometry.size, geometry.fill)
        except UndecodableImage:
            yield None
