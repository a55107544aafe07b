"""Build one rank's `BatchRequest`s from epoch plans: draws, mixtures and fill rows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry, centre_draws, draw_rows
from trainer.loading.augmentations import NO_AUGMENTATIONS, Augmentations
from trainer.loading.batch import BatchRequest
from trainer.loading.epoch_plan import LOOKS, EpochPlan, Schedule, StepIds
from trainer.loading.mixup import RowMix, draw_mix, partner_rows
from trainer.loading.sample_order import Ids, slice_for_rank

_ROWS_AT_ONCE = 8192
"""Rows for which all is drawn in one call: a call for each step would cost as much as a small step."""


def training_requests(
    schedule: Schedule,
    plans: Iterable[EpochPlan],
    index: SampleIndex,
    geometry: Geometry,
    first_step: int = 0,
    rank: int = 0,
    world: int = 1,
    augmentations: Augmentations = NO_AUGMENTATIONS,
) -> Iterator[BatchRequest]:
    """Yield one request per step of the plans from `first_step` on.

    A rank's rows are, for each part of the plan and each of its looks, its slice of the ids; then the partners that
    are other ranks' rows.
    """
    most = max(1, _ROWS_AT_ONCE * world // schedule.rows)
    for plan in plans:
        rows = sum(-(-part.rows // world) * len(part.looks) for part in plan.parts)
        steps = plan.steps(schedule, first_step)
        while group := list(islice(steps, most)):
            shown = [_rows_of_rank(schedule, plan, step, rank, world, geometry.size) for step in group]
            joined = _join(shown)
            draws = draw_rows(
                geometry,
                augmentations,
                schedule.stream,
                plan.epoch,
                joined.ids,
                joined.views if joined.views.any() else 0,
                index.width[joined.ids],
                index.height[joined.ids],
                joined.looks if joined.looks.any() else None,
            )
            end = 0
            for step, own in zip(group, shown, strict=True):
                part = slice(end, end := end + len(own.ids))
                yield BatchRequest(
                    ids=own.ids,
                    draws=draws[part],
                    rows=rows,
                    fill_with_images=True,
                    real=own.real,
                    step=step,
                    mix=own.mix,
                )


@dataclass(frozen=True, eq=False)
class _Rows:
    """What a rank shows in a step, or in several."""

    ids: Ids
    views: npt.NDArray[np.int64]
    looks: npt.NDArray[np.int8]
    """Index into LOOKS."""
    real: int = 0
    """How many of the rows are the rank's own samples."""
    mix: RowMix | None = None


def _join(rows: list[_Rows]) -> _Rows:
    ids, views, looks = zip(*((each.ids, each.views, each.looks) for each in rows), strict=True)
    return _Rows(np.concatenate(ids), np.concatenate(views), np.concatenate(looks))


def _rows_of_rank(schedule: Schedule, plan: EpochPlan, step: StepIds, rank: int, world: int, size: int) -> _Rows:
    """Return a rank's rows of a step. A rank without any still needs real images for BatchNorm: it shows those of all
    ranks, with weight 0."""
    position = step.step % schedule.steps_per_epoch
    ids, views, looks, own, starts = [], [], [], [], [0]
    for part_number, (part, of_step) in enumerate(zip(plan.parts, step.parts, strict=True)):
        for number, look in enumerate(part.looks):
            ids.append(of_step)
            views.append(np.broadcast_to(plan.views(part_number, position, number), of_step.shape))
            looks.append(np.full(of_step.shape, LOOKS.index(look), np.int8))
            own.append(slice_for_rank(np.arange(len(of_step)), rank, world) + starts[-1])
            starts.append(starts[-1] + len(of_step))
    every = _Rows(np.concatenate(ids), np.concatenate(views), np.concatenate(looks))
    rows = np.concatenate(own)
    real = len(rows)
    if not real:
        rows = np.arange(starts[-1])
    if plan.mixing is None:
        return _Rows(every.ids[rows], every.views[rows], every.looks[rows], real)
    partners = partner_rows(np.array(starts))[rows]
    missing = np.setdiff1d(partners, rows)
    shown = np.concatenate([rows, missing[np.argsort(every.ids[missing], kind="stable")]])
    places = np.empty(starts[-1], np.int64)
    places[shown] = np.arange(len(shown))
    shares, boxes = draw_mix(plan.mixing, schedule.stream, plan.epoch, every.ids[rows], every.views[rows], size)
    alone = len(shown) - len(rows)
    mix = RowMix(
        np.concatenate([places[partners], np.arange(len(rows), len(shown))]),
        np.concatenate([shares, np.ones(alone)]).astype(np.float32),
        guests=len(starts) - 1 if world > 1 else 0,
        boxes=None if boxes is None else np.concatenate([boxes, np.zeros((alone, 4), np.int32)]),
    )
    return _Rows(every.ids[shown], every.views[shown], every.looks[shown], real, mix)


def predict_requests(
    ids: Ids,
    batch: int,
    index: SampleIndex,
    geometry: Geometry,
    rank: int = 0,
    world: int = 1,
) -> Iterable[BatchRequest]:
    """Yield this rank's requests of a predict pass, with centre crops in shard order.

    Over all ranks, every id occurs exactly once.
    """
    ids = np.sort(ids)
    ids = slice_for_rank(ids[np.argsort(index.shard[ids], kind="stable")], rank, world)
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        yield BatchRequest(
            ids=part,
            draws=centre_draws(geometry, index.width[part], index.height[part]),
            rows=min(batch, len(ids)),
            fill_with_images=False,
        )
