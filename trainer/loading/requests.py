"""Build one rank's `BatchRequest`s from a plan: boxes, flips, operations, mixup, labels and fill rows."""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import numpy as np
import numpy.typing as npt

from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry, centre_boxes, draw_holes, training_boxes
from trainer.loading.batch import BatchRequest
from trainer.loading.mixup import RowMix, mix_for_rank
from trainer.loading.operations import NO_AUGMENTATION, Augmentation
from trainer.loading.sample_order import Ids, StepIds, TrainingPlan, slice_for_rank

_ROWS_AT_ONCE = 8192
"""Rows for which crops and flips are drawn in one call: a call for each step would cost as much as a small step."""


def training_requests(
    plan: TrainingPlan,
    index: SampleIndex,
    labels: npt.NDArray[np.int64],
    geometry: Geometry,
    first_step: int = 0,
    rank: int = 0,
    world: int = 1,
    augmentation: Augmentation = NO_AUGMENTATION,
) -> Iterator[BatchRequest]:
    """Yield one request per step from `first_step` on, with rows of S first, then rows of C, then fill rows.

    labels: int64 [samples], indexed by sample_id. With mixup, partners on other ranks follow the rows of C.
    """
    for steps in _group_steps(plan, first_step, world):
        epoch = steps[0].epoch
        rows = sum(-(-part // world) for part in plan.rows_at(epoch))
        shown = [_rows_of_rank(plan, step, rank, world) for step in steps]
        ids = np.concatenate([own for own, _, _ in shown])
        boxes, flips = training_boxes(geometry, plan.stream, epoch, ids, index.width[ids], index.height[ids])
        holes = draw_holes(geometry, plan.stream, epoch, ids)
        given, end = labels[ids], 0
        for step, (own, real, mix) in zip(steps, shown, strict=True):
            part = slice(end, end := end + len(own))
            yield BatchRequest(
                ids=own,
                boxes=boxes[part],
                flips=flips[part],
                labels=given[part],
                rows=rows,
                fill_with_images=True,
                real=real,
                step=step,
                operations=augmentation.draw(plan.stream, epoch, own),
                mix=mix,
                holes=None if holes is None else holes[part],
            )


def _group_steps(plan: TrainingPlan, first_step: int, world: int) -> Iterator[list[StepIds]]:
    """Yield the steps in groups of one epoch each, of about _ROWS_AT_ONCE rows of a rank."""
    most = max(1, _ROWS_AT_ONCE * world // plan.batch)
    for _, steps in groupby(plan.steps(first_step), lambda step: step.epoch):
        while group := list(islice(steps, most)):
            yield group


def _rows_of_rank(plan: TrainingPlan, step: StepIds, rank: int, world: int) -> tuple[Ids, int, RowMix | None]:
    """Return the ids that a rank shows in a step, how many of them are its own samples, and how to mix them."""
    own = np.concatenate([slice_for_rank(step.selected, rank, world), slice_for_rank(step.candidates, rank, world)])
    # A rank without samples in this step still needs real images for BatchNorm; they get weight 0.
    ids = own if len(own) else np.concatenate([step.selected, step.candidates])
    if plan.mixup == 0:
        return ids, len(own), None
    ids, mix = mix_for_rank(ids, step, plan.stream, plan.mixup, rank, world)
    return ids, len(own), mix


def predict_requests(
    ids: Ids,
    batch: int,
    index: SampleIndex,
    labels: npt.NDArray[np.int64],
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
            boxes=centre_boxes(geometry, index.width[part], index.height[part]),
            flips=np.zeros(len(part), bool),
            labels=labels[part],
            rows=min(batch, len(ids)),
            fill_with_images=False,
        )
