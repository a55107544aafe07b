"""Decodes JPEG and PNG shards of any size with a pool of threads (the decoders release the GIL)."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from shards.image_check import UndecodableImage
from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry
from trainer.loading.batch import Batch, BatchRequest, assemble
from trainer.loading.pixels import Normalise, Pixels, cut, decode
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
        whole_shards: bool = False,
    ) -> None:
        self._reader = ShardReader(index, whole_shards)
        self._geometry, self._normalise, self._device = geometry, normalise, device
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        waiting: deque[tuple[BatchRequest, Future[tuple[Pixels, npt.NDArray[np.int64]]]]] = deque()
        remaining = iter(requests)
        try:
            for request in islice(remaining, self._workers * _BATCHES_AHEAD):
                waiting.append((request, self._pool.submit(self._decode, request)))
            while waiting:
                request, decoding = waiting.popleft()
                pixels, failed = decoding.result()
                for following in islice(remaining, 1):
                    waiting.append((following, self._pool.submit(self._decode, following)))
                yield assemble(request, failed, partial(self._show, pixels), self._device)
        finally:
            for _, decoding in waiting:
                decoding.cancel()

    def _decode(self, request: BatchRequest) -> tuple[Pixels, npt.NDArray[np.int64]]:
        return decode_rows(request, (self._reader.bytes_of(int(sample)) for sample in request.ids), self._geometry)

    def _show(self, pixels: Pixels, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._normalise(torch.from_numpy(pixels[rows]).to(self._device, non_blocking=True))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


def decode_rows(
    request: BatchRequest, images: Iterable[bytes | None], geometry: Geometry
) -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Pixels of the request's rows, and the row numbers of images that cannot be decoded (or are None)."""
    size = geometry.size
    pixels = np.zeros((len(request.ids), size, size, 3), np.uint8)
    failed = []
    for row, data in enumerate(images):
        try:
            image = decode(data or b"")
        except UndecodableImage:
            failed.append(row)
            continue
        pixels[row] = cut(image, request.boxes[row], request.flips[row], size, geometry.fill)
    return pixels, np.asarray(failed, np.int64)
