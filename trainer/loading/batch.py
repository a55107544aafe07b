"""What loaders are asked for and what they give: the same two types for every backend."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.loading.sample_order import Ids
from trainer.loading.transfer import copy_to_device


@dataclass(frozen=True)
class BatchRequest:
    """The real rows of a batch: which samples, which whole-pixel boxes; a backend only cuts."""

    ids: Ids
    """int64 [n]"""
    boxes: npt.NDArray[np.int32]
    """[n, 4]: left, top, width, height in the stored image's pixels; may reach outside it (padding)."""
    flips: npt.NDArray[np.bool_]
    """[n]: mirror left to right after the cut."""
    labels: npt.NDArray[np.int64]
    """[n]"""
    rows: int
    """The fixed shape: rows beyond n are filled and carry weight 0."""
    fill_with_images: bool
    """Training repeats real images (zeros would poison BatchNorm); predict passes use zeros."""
    real: int = -1
    """How many of the n rows count; -1: all. 0 on a rank without work in this step."""

    @property
    def real_rows(self) -> int:
        return len(self.ids) if self.real < 0 else self.real


@dataclass
class Batch:
    """One rank's rows of a step, on the device."""

    ids: torch.Tensor
    """int64 [rows], -1 in filled rows"""
    images: torch.Tensor
    """float32 [rows, 3, size, size], normalised"""
    labels: torch.Tensor
    """int64 [rows]"""
    weights: torch.Tensor
    """float32 [rows], 1 in real rows and 0 in filled or unreadable ones"""
    request: BatchRequest | None = None
    """What was asked for."""
    unreadable: list[int] = field(default_factory=list)
    """sample_ids that could not be decoded"""


Batches = Generator[Batch, None, None]
"""Threads and decoders may stand behind them: whoever stops asking closes them."""


class Loader(Protocol):
    """Turns requests into batches, in the order of the requests, reading ahead as it likes."""

    def batches(self, requests: Iterable[BatchRequest]) -> Batches: ...

    def close(self) -> None: ...


def assemble_batch(
    request: BatchRequest,
    failed: npt.NDArray[np.int64],
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    device: torch.device,
) -> Batch:
    """Fill the request up to its fixed shape; `show` gives the images of the request rows it is handed.

    failed: request rows that could not be decoded; they keep their id and lose their weight.
    """
    real, rows = request.real_rows, request.rows
    source = _shown_rows(request, failed)
    images = show(source)
    if not request.fill_with_images and real < rows:
        images[real:] = 0
    ids = np.full(rows, -1, np.int64)
    ids[:real] = request.ids[:real]
    weights = (ids >= 0).astype(np.float32)
    lost = failed[failed < real]
    weights[lost] = 0
    if not request.fill_with_images and len(lost):
        images[copy_to_device(images.device, lost)[0]] = 0
    there = copy_to_device(device, ids, request.labels[source], weights)
    return Batch(
        ids=there[0],
        images=images,
        labels=there[1],
        weights=there[2],
        request=request,
        unreadable=[int(sample) for sample in request.ids[lost]],
    )


def select_rows(images: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """These rows of the images; the very same tensor where they are all, in order."""
    if np.array_equal(rows, np.arange(len(images))):
        return images
    return images[copy_to_device(images.device, rows)[0]]


def _shown_rows(request: BatchRequest, failed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The request row each batch row shows: itself while real, then row j mod n of the n available."""
    available = len(request.ids)
    index = np.arange(request.rows)
    source = np.where(index < request.real_rows, index, index % max(available, 1))
    readable = np.setdiff1d(np.arange(available), failed)
    if request.fill_with_images and len(failed) and len(readable):
        source = np.where(np.isin(source, failed), readable[source % len(readable)], source)
    return source
