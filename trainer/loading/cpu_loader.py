"""Decode JPEG and PNG images of any size in a thread pool (the decoders release the GIL)."""

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
from trainer.loading.pixels import Normalise, Pixels, augment, augment_and_normalise, crop, decode
from trainer.loading.prefetch import PrefetchThread
from trainer.loading.shard_reader import ShardReader

_PREFETCH_FACTOR = 2  # batches per worker, so that one slow image does not stall the network


class CpuLoader:
    """Decodes each batch in one thread of a pool, and yields the batches in request order."""

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
            yield from self._decode_ahead(requests)
            return
        with closing(PrefetchThread(self._decode_ahead(requests), self._device)) as prefetched:
            yield from prefetched

    def _decode_ahead(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        pending: deque[tuple[BatchRequest, Future[tuple[torch.Tensor, npt.NDArray[np.int64]]]]] = deque()
        remaining = iter(requests)
        try:
            for request in islice(remaining, self._workers * _PREFETCH_FACTOR):
                pending.append((request, self._pool.submit(self._decode, request)))
            while pending:
                request, decoding = pending.popleft()
                images, failed = decoding.result()
                for upcoming in islice(remaining, 1):
                    pending.append((upcoming, self._pool.submit(self._decode, upcoming)))
                yield assemble_batch(request, failed, partial(self._show, request, images), self._device)
        finally:
            for _, decoding in pending:
                decoding.cancel()

    def _decode(self, request: BatchRequest) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """Return the images of the request's rows, [n, size, size, 3], and the indices of rows that failed to decode.

        For a CPU, the images are augmented and normalised here, by several threads and while they are still in the
        CPU cache.
        """
        encoded = (self._reader.read_or_none(int(sample)) for sample in request.ids)
        normalise = self._normalise if self._normalise.fits_cpu else None
        images, failed = decode_rows(request, encoded, self._geometry, normalise)
        return torch.from_numpy(images), failed

    def _show(self, request: BatchRequest, images: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        shown = select_rows(images, rows)
        if self._normalise.fits_cpu:
            return shown.permute(0, 3, 1, 2)
        if self._device.type == "cuda":
            shown = shown.pin_memory()
        shown = shown.to(self._device, non_blocking=True)
        return augment_and_normalise(shown, request.draws[rows], self._normalise)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.close()


def decode_rows(
    request: BatchRequest,
    encoded: Iterable[bytes | None],
    geometry: Geometry,
    normalise: Normalise | None = None,
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
    """Decode and crop the request's rows; return images [n, size, size, 3] and the indices of failed rows.

    Images are uint8 crops, or float32 if `normalise` is given, which also augments them. A row fails if its entry in
    `encoded` is None or cannot be decoded; its image is then black.
    """
    shape = (geometry.size, geometry.size, 3)
    images = np.empty((len(request.ids), *shape), np.uint8 if normalise is None else np.float32)
    failed = []
    for row, image in enumerate(_decode_each(request, encoded, geometry)):
        if image is None:
            failed.append(row)
            image = np.zeros(shape, np.uint8)
        if normalise is None:
            images[row] = image
        else:
            normalise.write(augment(image, request.draws[row : row + 1]), images[row])
    return images, np.asarray(failed, np.int64)


def _decode_each(
    request: BatchRequest, encoded: Iterable[bytes | None], geometry: Geometry
) -> Iterator[Pixels | None]:
    for data, box, flip in zip(encoded, request.draws.boxes, request.draws.flips, strict=True):
        try:
            yield crop(decode(data or b""), box, flip, geometry.size, geometry.fill)
        except UndecodableImage:
            yield None
