"""The loader interface: every loader turns a `BatchRequest` into a `Batch`."""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.loading.augment import Draws
from trainer.loading.epoch_plan import StepIds
from trainer.loading.mixup import RowMix
from trainer.loading.sample_order import Ids
from trainer.loading.transfer import copy_to_device

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class BatchRequest:
    """The samples of a batch with all that was drawn for them; the loader only decodes and applies it."""

    ids: Ids
    """int64 [n]"""
    draws: Draws
    """What the n rows show of their images."""
    rows: int
    """Fixed number of rows of the batch; rows beyond n are fill rows with weight 0."""
    fill_with_images: bool
    """Whether fill rows repeat real images instead of being zero; in training, zeros would distort BatchNorm."""
    real: int = -1
    """How many of the n rows have weight 1; -1 for all, 0 on a rank that has no sample in this step."""
    step: StepIds | None = None
    """The ids of the training step over all ranks; None in predict passes."""
    mix: RowMix | None = None
    """How rows are mixed with others of the request; None without mixup."""

    @property
    def real_rows(self) -> int:
        return len(self.ids) if self.real < 0 else self.real


@dataclass(frozen=True)
class BatchMix:
    """How a Task mixes the rows of a batch, on the device."""

    partners: torch.Tensor
    """int64 [rows]: the batch's row, or guest row, with which each row is mixed."""
    shares: torch.Tensor
    """float32 [rows]: the share of the row itself; the rest is its partner's."""
    boxes: torch.Tensor | None = None
    """int64 [rows, 4]: left, top, right and bottom of what each row shows of its partner with CutMix; None with
    mixup."""


@dataclass
class Batch:
    """One rank's rows of a step, on the device; its Task knows their targets."""

    ids: torch.Tensor
    """int64 [rows + guests], -1 in fill rows. Guest rows are only there to be mixed with; most batches have none."""
    images: torch.Tensor
    """[rows + guests, 3, size, size], normalised; float32 or the autocast dtype"""
    weights: torch.Tensor
    """float32 [rows], 1 for real rows, 0 for fill rows and unreadable rows"""
    request: BatchRequest | None = None
    """The request this batch answers."""
    unreadable: list[int] = field(default_factory=list)
    """sample_ids that could not be decoded"""
    step: StepIds | None = None
    """The ids of the training step over all ranks; None in predict passes."""
    mix: BatchMix | None = None
    """None if rows are not mixed."""

    def tensors(self) -> list[torch.Tensor]:
        of_mix = [] if self.mix is None else [self.mix.partners, self.mix.shares, self.mix.boxes]
        return [tensor for tensor in (self.ids, self.images, self.weights, *of_mix) if tensor is not None]


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
    sources, ids, weights, unreadable, mixes = [], [], [], [], []
    for number, request in enumerate(requests):
        lost = _NO_ROWS if own_failed is None else own_failed[number]
        source = _shown_rows(request, lost)
        own_ids, own_weights = _ids_and_weights(request, lost)
        if request.mix is not None:
            guests, mix = _place_partners(request.mix, source, lost)
            source, own_ids = np.concatenate([source, guests]), np.concatenate([own_ids, request.ids[guests]])
            mixes.append(mix)
        sources.append(starts[number] + source)
        ids.append(own_ids)
        weights.append(own_weights)
        unreadable.append([int(sample) for sample in request.ids[lost[lost < request.real_rows]]])
    source, weight = np.concatenate(sources), np.concatenate(weights)
    if requests[0].draws.holes is not None:
        show = partial(_show_with_holes, show, np.concatenate([request.draws.holes for request in requests]))
    images = show(source)
    if not requests[0].fill_with_images and not weight.all():
        images[copy_to_device(images.device, np.flatnonzero(weight == 0))[0]] = 0
    columns = [np.concatenate(each) for each in zip(*mixes, strict=True)]
    copied = copy_to_device(device, np.concatenate(ids), weight, *columns)
    rows, shown = [len(each) for each in weights], [len(each) for each in sources]
    mixed = zip(*(tensor.split(rows) for tensor in copied[2:]), strict=True) if mixes else repeat(None)
    tensors = zip(copied[0].split(shown), images.split(shown), copied[1].split(rows), strict=True)
    return [
        Batch(*own, request, lost, request.step, None if mix is None else BatchMix(*mix))
        for own, request, lost, mix in zip(tensors, requests, unreadable, mixed, strict=False)
    ]


def _place_partners(
    mix: RowMix, source: npt.NDArray[np.int64], failed: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.generic]]]:
    """Return the request rows that the guest rows show, and of each batch row: its partner's batch row, its share
    and, with CutMix, its box. A row whose partner is unreadable stays as it is.

    source: the request row that each batch row shows; failed: request rows that could not be decoded.
    """
    partners, shares = mix.partners[source], mix.shares[source]
    places = np.full(len(mix.partners), -1)
    places[source[::-1]] = np.arange(len(source))[::-1]
    missing = np.setdiff1d(partners[places[partners] < 0], failed)[: mix.guests]
    places[missing] = len(source) + np.arange(len(missing))
    lost = np.isin(partners, failed) | (places[partners] < 0)
    guests = np.concatenate([missing, np.zeros(mix.guests - len(missing), np.int64)])
    of_rows: list[npt.NDArray[np.generic]] = [
        np.where(lost, np.arange(len(source)), places[partners]),
        np.where(lost, np.float32(1), shares),
    ]
    if mix.boxes is not None:
        of_rows.append(np.where(lost[:, None], 0, mix.boxes[source]).astype(np.int64))
    return guests, of_rows


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
