"""Decode images with NVIDIA DALI: JPEGs with the GPU's decoders, or on CPU threads if there is no GPU."""

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt
import torch

from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry
from trainer.loading.batch import Batch, Batches, BatchRequest, assemble_batch, select_rows
from trainer.loading.cpu_loader import decode_rows
from trainer.loading.dali_pipeline import DecodingFailed, DecodingPipeline, EncodedBatch
from trainer.loading.pixels import Normalise, augment_and_normalise
from trainer.loading.prefetch import PrefetchThread
from trainer.loading.shard_reader import ShardReader

_log = logging.getLogger(__name__)

_MAX_READ_THREADS = 8  # enough for one GPU; more threads only contend for the GIL
_REQUESTS_AHEAD = 8  # requests read from disk before DALI needs them
_READ_CHUNK = 64  # samples per read task, so that several threads share a request


@dataclass(frozen=True)
class _Encoded:
    """A request with its encoded images; an image that cannot be read is None."""

    request: BatchRequest
    images: list[bytes | None]

    @property
    def failed(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero([image is None for image in self.images])


class DaliLoader:
    """Reads ahead in a thread pool; a prefetch thread feeds DALI and queues batches for the training loop.

    Crops and flips come from the request, so that every loader crops the same pixels.
    """

    def __init__(
        self,
        index: SampleIndex,
        geometry: Geometry,
        normalise: Normalise,
        device: torch.device,
        workers: int,
        scales: bool,
        window: int | None = None,
        exact: bool = False,
    ) -> None:
        """scales: whether any crop must be scaled to the input size; exact: whether to decode reproducibly."""
        self._reader = ShardReader(index, window)
        self._geometry, self._normalise, self._device = geometry, normalise, device
        self._workers, self._scales, self._exact = workers, scales, exact
        self._pool = ThreadPoolExecutor(min(workers, _MAX_READ_THREADS), thread_name_prefix="read")
        self._idle: list[DecodingPipeline] = []
        self._lock = threading.Lock()
        self._warned = False

    def batches(self, requests: Iterable[BatchRequest]) -> Batches:
        with closing(PrefetchThread(self._decode(iter(requests)), self._device)) as prefetched:
            yield from prefetched

    def _decode(self, requests: Iterator[BatchRequest]) -> Generator[Batch, None, None]:
        """Yield the batches in request order; runs in the prefetch thread."""
        with closing(self._read_ahead(requests)) as encoded:
            for rows, group in groupby(encoded, key=lambda one: max(one.request.rows, len(one.images))):
                yield from self._decode_group(rows, group)

    def _decode_group(self, rows: int, group: Iterator[_Encoded]) -> Iterator[Batch]:
        """Decode requests with the same number of rows in one pipeline; replace it after a decoding error."""
        while True:
            pipeline = self._acquire_pipeline(rows)
            decoding: deque[_Encoded] = deque()
            try:
                with closing(pipeline.decode(_feed(group, decoding))) as decoded:
                    for pixels in decoded:
                        yield self._batch(decoding.popleft(), pixels)
            except DecodingFailed as failure:
                pipeline.close()
                self._warn_once(failure)
                yield from self._decode_on_cpu(decoding)
            except BaseException:
                pipeline.close()
                raise
            else:
                self._idle.append(pipeline)
                return

    def _warn_once(self, failure: DecodingFailed) -> None:
        if not self._warned:
            _log.warning("DALI could not decode a batch; decoding it on the CPU instead: %s", failure)
        self._warned = True

    def _acquire_pipeline(self, rows: int) -> DecodingPipeline:
        """Return an idle pipeline with enough rows, or create one, as for a predict pass during training."""
        with self._lock:
            for pipeline in self._idle:
                if pipeline.rows >= rows:
                    self._idle.remove(pipeline)
                    return pipeline
        return DecodingPipeline(rows, self._geometry, self._scales, self._device, self._workers, self._exact)

    def _read_ahead(self, requests: Iterator[BatchRequest]) -> Generator[_Encoded, None, None]:
        reading = deque(self._submit_reads(request) for request in islice(requests, _REQUESTS_AHEAD))
        try:
            while reading:
                request, parts = reading[0]
                encoded = _Encoded(request, [image for part in parts for image in part.result()])
                reading.popleft()
                reading.extend(self._submit_reads(request) for request in islice(requests, 1))
                yield encoded
        finally:
            for _, parts in reading:
                for part in parts:
                    part.cancel()

    def _submit_reads(self, request: BatchRequest) -> tuple[BatchRequest, list[Future[list[bytes | None]]]]:
        ids = request.ids.tolist()
        starts = range(0, len(ids), _READ_CHUNK)
        return request, [self._pool.submit(self._read, ids[start : start + _READ_CHUNK]) for start in starts]

    def _read(self, ids: list[int]) -> list[bytes | None]:
        return [self._reader.read_or_none(sample) for sample in ids]

    def _batch(self, encoded: _Encoded, pixels: torch.Tensor) -> Batch:
        return assemble_batch(
            encoded.request, encoded.failed, partial(self._show, encoded.request, pixels), self._device
        )

    def _decode_on_cpu(self, decoding: deque[_Encoded]) -> Iterator[Batch]:
        """Decode on the CPU, one image at a time, the requests that were in flight when DALI failed."""
        while decoding:
            encoded = decoding.popleft()
            pixels, failed = decode_rows(encoded.request, encoded.images, self._geometry)
            show = partial(self._show, encoded.request, torch.from_numpy(pixels).to(self._device))
            yield assemble_batch(encoded.request, failed, show, self._device)

    def _show(self, request: BatchRequest, pixels: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return augment_and_normalise(select_rows(pixels, rows), request.draws[rows], self._normalise)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()
        self._reader.close()


def _feed(group: Iterator[_Encoded], decoding: deque[_Encoded]) -> Iterator[EncodedBatch]:
    """Yield the encoded batches to the pipeline, and record each request in `decoding` as in flight."""
    for encoded in group:
        decoding.append(encoded)
        yield EncodedBatch(encoded.images, encoded.request.draws.boxes, encoded.request.draws.flips)
