"""A DALI pipeline that turns encoded images, crop boxes and flips into uint8 images of the network's input size."""

import io
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import Pipeline, fn, types
from PIL import Image

from trainer.loading.augment import Geometry

_PREFETCH_DEPTH = 2
# Share of JPEGs sent to the GPU's hardware decoder, by whether chroma is upsampled smoothly; the rest go to the CUDA
# decoder. These values were the fastest on an H200 with 8 threads.
_HARDWARE_SHARE = {False: 0.75, True: 0.68}


class DecodingFailed(Exception):
    """DALI could not decode one of the images in flight; the pipeline is unusable afterwards."""


@dataclass(frozen=True)
class EncodedBatch:
    """A batch to decode; an image that is None is decoded as grey."""

    images: Sequence[bytes | None]
    boxes: npt.NDArray[np.int32]
    """[n, 4]: left, top, width, height"""
    flips: npt.NDArray[np.bool_]


class DecodingPipeline:
    """Decodes batches of up to `rows` images on DALI's own threads and streams, with a few batches in flight."""

    def __init__(
        self, rows: int, geometry: Geometry, scales: bool, device: torch.device, threads: int, exact: bool = False
    ) -> None:
        """exact: decode reproducibly, with the GPU's CUDA decoder alone. By default DALI splits images between it and
        the hardware decoder by load, and the results of the two differ by single grey levels."""
        self.rows, self._exact = rows, exact
        self._geometry, self._scales, self._device = geometry, scales, device
        self._gpu = device.type == "cuda"
        self._placeholder = _grey_jpeg(geometry.size)
        self._source: Iterator[EncodedBatch] = iter(())
        # Kept alive, because DALI reads them without copying.
        self._buffers: deque[list[np.ndarray]] = deque(maxlen=_PREFETCH_DEPTH + 2)
        self._source_error: RuntimeError | None = None
        self._pipeline = self._build(threads)

    def close(self) -> None:
        """Free threads and memory now, instead of leaving a reference cycle to the garbage collector."""
        del self._pipeline

    def decode(self, source: Iterator[EncodedBatch]) -> Generator[torch.Tensor, None, None]:
        """Yield the images of each batch in `source`: uint8 [n, size, size, 3], ready on the current CUDA stream."""
        self._source = source
        try:
            while True:
                yield self._run()
        except StopIteration:
            self._pipeline.reset()
        except GeneratorExit:  # the consumer stopped early
            self._source = iter(())
            self._drain()
            raise

    def _run(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._gpu else None
        try:
            (images,) = self._pipeline.run(stream)
        except RuntimeError as error:
            if error is self._source_error:
                raise  # the error came from the source, not from DALI
            raise DecodingFailed(str(error)) from error
        return torch.from_dlpack(images.as_tensor())

    def _drain(self) -> None:
        """Discard the batches in flight, so that the pipeline can be reused."""
        try:
            while True:
                self._run()
        except (StopIteration, DecodingFailed):
            self._pipeline.reset()

    def _next_inputs(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """Return the next batch to DALI: images, corners (top, left), sides (height, width) and flips.

        This is the callback of DALI's external source.
        """
        try:
            batch = next(self._source)
        except RuntimeError as error:
            self._source_error = error
            raise
        missing = np.array([image is None for image in batch.images])[:, None]
        boxes = np.where(missing, np.array([0, 0, self._geometry.size, self._geometry.size], np.int32), batch.boxes)
        images = [np.frombuffer(self._placeholder if image is None else image, np.uint8) for image in batch.images]
        self._buffers.append(images)
        return images, boxes[:, [1, 0]].copy(), boxes[:, [3, 2]].copy(), batch.flips.astype(np.int32)

    def _build(self, threads: int) -> Pipeline:
        pipeline = Pipeline(
            self.rows,
            threads,
            (self._device.index or 0) if self._gpu else None,
            prefetch_queue_depth=_PREFETCH_DEPTH,
            exec_dynamic=True,
        )
        with pipeline:
            # no_copy: DALI reads directly from the buffers that the reading threads filled
            images, corners, sides, flips = fn.external_source(self._next_inputs, num_outputs=4, no_copy=True)
            crops = self._decode_crops(images, corners, sides)
            if self._scales:
                crops = fn.resize(crops, size=(self._geometry.size, self._geometry.size))
            pipeline.set_outputs(fn.flip(crops, horizontal=flips))
        pipeline.build()
        return pipeline

    def _decode_crops(self, images: Any, corners: Any, sides: Any) -> Any:
        # Packing has already applied the EXIF orientation.
        decoding: dict[str, Any] = {"output_type": types.RGB, "adjust_orientation": False}
        box = {"start": corners, "shape": sides, "axes": (0, 1)}
        if self._gpu:
            smooth = self._geometry.smooth_chroma
            decoding |= {
                "device": "mixed",
                "hw_decoder_load": 0.0 if self._exact else _HARDWARE_SHARE[smooth],
                "jpeg_fancy_upsampling": smooth,
            }
        elif self._geometry.pad == 0:  # libjpeg can skip pixels outside the box
            return fn.decoders.image_slice(images, **box, **decoding)
        padding: dict[str, Any] = {"out_of_bounds_policy": "pad", "fill_values": 0} if self._geometry.pad else {}
        return fn.slice(fn.decoders.image(images, **decoding), **box, **padding)


def _grey_jpeg(size: int) -> bytes:
    """Create the placeholder that DALI decodes in place of an image that could not be read."""
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(stream, format="JPEG")
    return stream.getvalue()
