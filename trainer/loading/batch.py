"""The loader interface: every loader turns a `BatchRequest` into a `Batch`."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.loading.mixup import RowMix
from trainer.loading.operations import Operations
from trainer.loading.sample_order import Ids, StepIds
from trainer.loading.transfer import copy_to_device


@dataclass(frozen=True)
class BatchRequest:
    """The samples of a batch with all that was drawn for them; the loader only decodes and applies it."""

    ids: Ids
    """int64 [n]"""
    boxes: npt.NDArray[np.int32]
    """[n, 4]: left, top, width, height in pixels of the stored image; a box may extend into the padding."""
    flips: npt.NDArray[np.bool_]
    """[n]: flip horizontally after the crop."""
    labels: npt.NDArray[np.int64]
    """[n]"""
    rows: int
    """Fixed number of rows of the batch; rows beyond n are fill rows with weight 0."""
    fill_with_images: bool
    """Whether fill rows repeat real images instead of being zero; in training, zeros would distort BatchNorm."""
    real: int = -1
    """How many of the n rows have weight 1; -1 for all, 0 on a rank that has no sample in this step."""
    step: StepIds | None = None
    """The ids of the training step over all ranks; None in predict passes."""
    operations: Sequence[Operations] = ()
    """[n], the operations on each image after the crop; empty if there are none."""
    mix: RowMix | None = None
    """How rows are mixed with others of the request; None without mixup."""

    @property
    def real_rows(self) -> int:
        return len(self.ids) if self.real < 0 else self.real


@dataclass(frozen=True)
class MixedLabels:
    """The second labels of the rows of a batch with mixup, on the device."""

    partners: torch.Tensor
    """int64 [rows]"""
    shares: torch.Tensor
    """float32 [rows], the share of the row's own label; the rest is that of its partner's."""


@dataclass
class Batch:
    """One rank's rows of a step, on the device."""

    ids: torch.Tensor
    """int64 [rows], -1 in fill rows"""
    images: torch.Tensor
    """[rows, 3, size, size], normalised; float32 or the autocast dtype"""
    labels: torch.Tensor
    """int64 [rows]"""
    weights: torch.Tensor
    """float32 [rows], 1 for real rows, 0 for fill rows and unreadable rows"""
    request: BatchRequest | None = None
    """The request this batch answers."""
    unreadable: list[int] = field(default_factory=list)
    """sample_ids that could not be decoded"""
    step: StepIds | None = None
    """The ids of the training step over all ranks; None in predict passes."""
    mixed: MixedLabels | None = None
    """None without mixup."""

    def tensors(self) -> list[torch.Tensor]:
        mixed = [] if self.mixed is None else [self.mixed.partners, self.mixed.shares]
        return [self.ids, self.images, self.labels, self.weights, *mixed]


Batches = Generator[Batch, None, None]
"""A generator of batches. A consumer that stops early must close it, to end background threads and decoders."""


class Loader(Protocol):
    """Turns requests into batches, in order; it may prefetch."""

    def batches(self, requests: Iterable[BatchRequest]) -> Batches: ...

    def close(self) -> None: ...


def assemble_batch(
    request: BatchRequest,
    failed: npt.NDArray[np.int64],
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    device: torch.device,
) -> Batch:
    """Build a batch from decoded images, padded with fill rows to its fixed shape.

    failed: request rows that could not be decoded; they keep their id and get weight 0. show: returns the images of
    the given request rows.
    """
    real, rows = request.real_rows, request.rows
    source = _shown_rows(request, failed)
    images = show(source)
    mixed = None
    if request.mix is not None:
        images, mixed = _mix(request, request.mix, failed, source, images, show)
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
        step=request.step,
        mixed=mixed,
    )


def _mix(
    request: BatchRequest,
    mix: RowMix,
    failed: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    images: torch.Tensor,
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
) -> tuple[torch.Tensor, MixedLabels]:
    """Mix the images with those of their partners, in float32; a row whose partner is unreadable stays as it is.

    source: the request row that each batch row shows; images: those of `source`.
    """
    lost = np.isin(mix.partners[source], failed)
    partners = np.where(lost, source, mix.partners[source])
    shares = np.where(lost, np.float32(1), mix.shares[source])
    share, labels = copy_to_device(images.device, shares, request.labels[partners])
    weight = share[:, None, None, None]
    mixed = images.float() * weight + show(partners).float() * (1 - weight)
    return mixed.to(images.dtype), MixedLabels(labels, share)


def select_rows(images: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Return `images[rows]`, without a copy if `rows` lists all rows in order."""
    if np.array_equal(rows, np.arange(len(images))):
        return images
    return images[copy_to_device(images.device, rows)[0]]


def _shown_rows(request: BatchRequest, failed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for each batch row, the request row whose image it shows; fill rows repeat the request's rows.

    In training, a readable row also replaces each row that could not be decoded.
    """
    available = len(request.ids)
    index = np.arange(request.rows)
    source = np.where(index < request.real_rows, index, index % max(available, 1))
    readable = np.setdiff1d(np.arange(available), failed)
    if request.fill_with_images and len(failed) and len(readable):
        source = np.where(np.isin(source, failed), readable[source % len(readable)], source)
    return source
