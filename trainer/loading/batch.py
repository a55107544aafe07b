"""The loader interface: every loader turns a `BatchRequest` into a `Batch`."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.loading.mixup import RowMix
from trainer.loading.operations import Operations
from trainer.loading.sample_order import Ids, StepIds
from trainer.loading.transfer import copy_to_device

_NO_ROWS = np.empty(0, np.int64)


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
    holes: npt.NDArray[np.int32] | None = None
    """[n, 4]: left, top, right and bottom of the square to blank out in each image; None without cutout."""

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
    return assemble_batches([request], failed, show, device)[0]


def assemble_batches(
    requests: Sequence[BatchRequest],
    failed: npt.NDArray[np.int64],
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    device: torch.device,
) -> list[Batch]:
    """Like `assemble_batch` for consecutive requests of one kind, with one copy and one call of `show` for them all.

    failed, show: of request rows, counted through all requests. The batches are views of shared tensors.
    """
    starts = np.cumsum([0, *(len(request.ids) for request in requests)])
    own_failed = [failed[(failed >= a) & (failed < b)] - a for a, b in pairwise(starts)] if len(failed) else None
    sources, ids, weights, unreadable = [], [], [], []
    for number, request in enumerate(requests):
        lost = _NO_ROWS if own_failed is None else own_failed[number]
        sources.append(starts[number] + _shown_rows(request, lost))
        own_ids, own_weights = _ids_and_weights(request, lost)
        ids.append(own_ids)
        weights.append(own_weights)
        unreadable.append([int(sample) for sample in request.ids[lost[lost < request.real_rows]]])
    source, weight = np.concatenate(sources), np.concatenate(weights)
    labels = np.concatenate([request.labels for request in requests])
    if requests[0].holes is not None:
        show = partial(_show_with_holes, show, np.concatenate([request.holes for request in requests]))
    images = show(source)
    mixed: list[MixedLabels | None] = [None] * len(requests)
    rows = [request.rows for request in requests]
    if requests[0].mix is not None:
        images, shared = _mix(_join_mixes(requests, starts), labels, failed, source, images, show)
        parts = zip(shared.partners.split(rows), shared.shares.split(rows), strict=True)
        mixed = [MixedLabels(partners, shares) for partners, shares in parts]
    if not requests[0].fill_with_images and not weight.all():
        images[copy_to_device(images.device, np.flatnonzero(weight == 0))[0]] = 0
    there = copy_to_device(device, np.concatenate(ids), labels[source], weight)
    tensors = zip(*(tensor.split(rows) for tensor in (there[0], images, there[1], there[2])), strict=True)
    return [
        Batch(own_ids, own_images, own_labels, own_weights, request, lost, request.step, mix)
        for (own_ids, own_images, own_labels, own_weights), request, lost, mix in zip(
            tensors, requests, unreadable, mixed, strict=True
        )
    ]


def _show_with_holes(
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    holes: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
) -> torch.Tensor:
    """Show these rows with their holes: pixels that are 0 after normalisation, which is the mean."""
    images = show(rows)
    (own,) = copy_to_device(images.device, holes[rows])
    left, top, right, bottom = own.long().unbind(dim=1)
    y, x = (torch.arange(size, device=images.device) for size in images.shape[2:])
    across = (x >= left[:, None]) & (x < right[:, None])
    down = (y >= top[:, None]) & (y < bottom[:, None])
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0.0)


def _ids_and_weights(
    request: BatchRequest, failed: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    real = request.real_rows
    ids = np.full(request.rows, -1, np.int64)
    ids[:real] = request.ids[:real]
    weights = (ids >= 0).astype(np.float32)
    weights[failed[failed < real]] = 0
    return ids, weights


def _join_mixes(requests: Sequence[BatchRequest], starts: npt.NDArray[np.int64]) -> RowMix:
    """Join the mixes of consecutive requests. starts: the first row of each request, counted through all of them."""
    mixes = [request.mix for request in requests if request.mix is not None]
    partners = [start + mix.partners for start, mix in zip(starts, mixes, strict=False)]
    return RowMix(np.concatenate(partners), np.concatenate([mix.shares for mix in mixes]))


def _mix(
    mix: RowMix,
    labels: npt.NDArray[np.int64],
    failed: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    images: torch.Tensor,
    show: Callable[[npt.NDArray[np.int64]], torch.Tensor],
) -> tuple[torch.Tensor, MixedLabels]:
    """Mix the images with those of their partners, in float32; a row whose partner is unreadable stays as it is.

    labels: of the request rows; source: the request row that each batch row shows; images: those of `source`.
    """
    lost = np.isin(mix.partners[source], failed)
    partners = np.where(lost, source, mix.partners[source])
    shares = np.where(lost, np.float32(1), mix.shares[source])
    share, partner_labels = copy_to_device(images.device, shares, labels[partners])
    weight = share[:, None, None, None]
    mixed = images.float() * weight + show(partners).float() * (1 - weight)
    return mixed.to(images.dtype), MixedLabels(partner_labels, share)


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
    if request.fill_with_images and len(failed):
        readable = np.setdiff1d(np.arange(available), failed)
        if len(readable):
            source = np.where(np.isin(source, failed), readable[source % len(readable)], source)
    return source
