"""Build one rank's `BatchRequest`s from a plan: boxes, flips, operations, mixup, labels and fill rows."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from shards.sample_index import SampleIndex
from trainer.loading.augment import Geometry, centre_boxes, training_boxes
from trainer.loading.batch import BatchRequest
from trainer.loading.mixup import mix_for_rank
from trainer.loading.operations import NO_AUGMENTATION, Augmentation
from trainer.loading.sample_order import Ids, TrainingPlan, slice_for_rank


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
    for step in plan.steps(first_step):
        own = np.concatenate(
            [slice_for_rank(step.selected, rank, world), slice_for_rank(step.candidates, rank, world)]
        )
        # A rank without samples in this step still needs real images for BatchNorm; they get weight 0.
        ids = own if len(own) else np.concatenate([step.selected, step.candidates])
        mix = None
        if plan.mixup > 0:
            ids, mix = mix_for_rank(ids, step, plan.stream, plan.mixup, rank, world)
        boxes, flips = training_boxes(geometry, plan.stream, step.epoch, ids, index.width[ids], index.height[ids])
        yield BatchRequest(
            ids=ids,
            boxes=boxes,
            flips=flips,
            labels=labels[ids],
            rows=sum(-(-part // world) for part in plan.rows_at(step.epoch)),
            fill_with_images=True,
            real=len(own),
            step=step,
            operations=augmentation.draw(plan.stream, step.epoch, ids),
            mix=mix,
        )


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
