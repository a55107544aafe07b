"""One DALI pipeline: encoded images, boxes and flips go in, uint8 pictures of the network's size come out."""

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

_BATCHES_IN_FLIGHT = 2
# The share of the JPEGs that go to the GPU's fixed-function decoder, the rest go to its kernels: the fastest on an
# H200 with 8 threads, by whether chroma is upsampled smoothly.
_HARDWARE_SHARE = {False: 0.75, True: 0.68}


class DecodingFailed(Exception):
    """DALI could not decode one of the images under way; the pipeline cannot be used any more."""


@dataclass(frozen=True)
class EncodedBatch:
    """A batch to decode; an image that is None is shown gray."""

    images: Sequence[bytes | None]
    boxes: npt.NDArray[np.int32]
    """[n, 4]: left, top, width, height"""
    flips: npt.NDArray[np.bool_]


class DecodingPipeline:
    """Batches of up to `rows` images; a few are under way at once, in DALI's own threads and streams."""

    def __init__(
        self, rows: int, geometry: Geometry, scales: bool, device: torch.device, threads: int, exact: bool = False
    ) -> None:
        """exact: the same bits every time. The two decoders of a GPU differ by a gray level here and there, and DALI
        hands images to whichever is free: then its kernels decode all of them."""
        self.rows, self._exact = rows, exact
        self._geometry, self._scales, self._device = geometry, scales, device
        self._gpu = device.type == "cuda"
        self._placeholder = _gray_jpeg(geometry.size)
        self._source: Iterator[EncodedBatch] = iter(())
        self._held: deque[list[np.ndarray]] = deque(maxlen=_BATCHES_IN_FLIGHT + 2)  # DALI decodes from these
        self._source_error: RuntimeError | None = None
        self._pipeline = self._built(threads)

    def close(self) -> None:
        """Let its threads and memory go now: it and its callback hold each other, which only the collector undoes."""
        del self._pipeline

    def decode(self, source: Iterator[EncodedBatch]) -> Generator[torch.Tensor, None, None]:
        """For each batch of `source`, in order: uint8 [n, size, size, 3], ready on the device's current stream."""
        self._source = source
        try:
            while True:
                yield self._take()
        except StopIteration:
            self._pipeline.reset()
        except GeneratorExit:  # nobody wants the rest
            self._source = iter(())
            self._drain()
            raise

    def _take(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._gpu else None
        try:
            (pictures,) = self._pipeline.run(stream)
        except RuntimeError as error:
            if error is self._source_error:
                raise  # not DALI's: whoever wants the batches shall see it
            raise DecodingFailed(str(error)) from error
        return torch.from_dlpack(pictures.as_tensor())

    def _drain(self) -> None:
        try:
            while True:
                self._take()
        except (StopIteration, DecodingFailed):
            self._pipeline.reset()

    def _next(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
        """DALI's next batch: images, corners (top, left), sides (height, width), flips."""
        try:
            fed = next(self._source)
        except RuntimeError as error:
            self._source_error = error
            raise
        missing = np.array([image is None for image in fed.images])[:, None]
        boxes = np.where(missing, np.array([0, 0, self._geometry.size, self._geometry.size], np.int32), fed.boxes)
        images = [np.frombuffer(self._placeholder if image is None else image, np.uint8) for image in fed.images]
        self._held.append(images)
        return images, boxes[:, [1, 0]].copy(), boxes[:, [3, 2]].copy(), fed.flips.astype(np.int32)

    def _built(self, threads: int) -> Pipeline:
        pipeline = Pipeline(
            self.rows,
            threads,
            (self._device.index or 0) if self._gpu else None,
            prefetch_queue_depth=_BATCHES_IN_FLIGHT,
            exec_dynamic=True,
        )
        with pipeline:
            # no copy: DALI reads the very bytes that the reading threads left in memory
            images, corners, sides, flips = fn.external_source(self._next, num_outputs=4, no_copy=True)
            pieces = self._cut(images, corners, sides)
            if self._scales:
                pieces = fn.resize(pieces, size=(self._geometry.size, self._geometry.size))
            pipeline.set_outputs(fn.flip(pieces, horizontal=flips))
        pipeline.build()
        return pipeline

    def _cut(self, images: Any, corners: Any, sides: Any) -> Any:
        # Packed images stand upright, whatever an EXIF block may say.
        decoding: dict[str, Any] = {"output_type": types.RGB, "adjust_orientation": False}
        box = {"start": corners, "shape": sides, "axes": (0, 1)}
        if self._gpu:
            smooth = self._geometry.smooth_chroma
            decoding |= {
                "device": "mixed",
                "hw_decoder_load": 0.0 if self._exact else _HARDWARE_SHARE[smooth],
                "jpeg_fancy_upsampling": smooth,
            }
        elif self._geometry.pad == 0:  # libjpeg can skip what lies outside the box
            return fn.decoders.image_slice(images, **box, **decoding)
        beyond: dict[str, Any] = {"out_of_bounds_policy": "pad", "fill_values": 0} if self._geometry.pad else {}
        return fn.slice(fn.decoders.image(images, **decoding), **box, **beyond)


def _gray_jpeg(size: int) -> bytes:
    """What DALI gets to decode in the place of an image that could not be read."""
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (128, 128, 128)).save(stream, format="JPEG")
    return stream.getvalue()
