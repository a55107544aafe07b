"""Fit the batch, its parts and the length of a training to the size of the data: pure functions of counts."""

import math
from typing import Any, TypeVar

from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import Recipe, TrainingConfig

SMALLEST_BATCH, LARGEST_BATCH = 16, 128
STEPS_PER_EPOCH = 8
"""`batch.global: auto` is the largest power of two that gives a fold at least this many steps per epoch."""
_FEW_STEPS, _FEW_STEPS_IF_EASY = 200, 64
_SMALL_IMAGE = 32  # pixels

Trained = TypeVar("Trained", bound=TrainingConfig)


def count_steps(samples: int, batch: int) -> int:
    """Return the steps of an epoch over `samples`."""
    return -(-samples // batch)


def count_trained(recipe: Recipe, samples: int) -> int:
    """Return how many of the samples are trained on, to within one per class, with `data.eval_fraction`."""
    return round(samples * (1 - recipe.data.eval_fraction))


def fit_batch(samples: int) -> int:
    """Return the batch of a training on `samples`: a power of two from SMALLEST_BATCH to LARGEST_BATCH."""
    batch = LARGEST_BATCH
    while batch > SMALLEST_BATCH and count_steps(samples, batch) < STEPS_PER_EPOCH:
        batch //= 2
    return batch


def resolve_batch(recipe: Recipe, samples: int | None) -> Recipe:
    """Replace `batch.global: auto` with a number. samples: trained on; None: unknown, so assume many."""
    if recipe.batch.global_ != "auto":
        return recipe
    held_out = 0 if recipe.incv is None or samples is None else -(-samples // recipe.incv.folds)
    rows = LARGEST_BATCH if samples is None else fit_batch(samples - held_out)  # the smallest training: in round 1
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_": rows})})


def fit_section(section: Trained, steps_per_epoch: int) -> Trained:
    """Raise `epochs` so that the training has at least `min_steps` steps; return the section itself if it has.

    Everything that counts epochs is stretched by the same factor: the optimiser's milestones and warm-up, and the
    section's own keys whose names end in `_epochs`.
    """
    epochs = max(section.epochs, count_steps(section.min_steps, steps_per_epoch))
    if epochs == section.epochs:
        return section
    factor = epochs / section.epochs
    names = [name for name in type(section).model_fields if name.endswith("_epochs")]
    stretched = {name: _stretch(getattr(section, name), factor) for name in names}
    optimizer = _stretch_optimizer(section.optimizer, factor)
    return section.model_copy(update={**stretched, "epochs": epochs, "optimizer": optimizer})


def _stretch_optimizer(optimizer: OptimizerConfig, factor: float) -> OptimizerConfig:
    milestones = tuple((_stretch(epoch, factor), rate) for epoch, rate in optimizer.milestones)
    warmup = optimizer.warmup_epochs * factor
    return optimizer.model_copy(update={"milestones": milestones, "warmup_epochs": warmup})


def _stretch(epochs: Any, factor: float) -> Any:
    """Multiply a number of epochs, rounding halves up, which keeps increasing milestones increasing; others stay."""
    return math.floor(epochs * factor + 0.5) if isinstance(epochs, int) else epochs


def describe_lengths(recipe: Recipe, trainings: dict[str, int]) -> tuple[list[str], list[str]]:
    """Return notes on trainings that `min_steps` prolongs, and warnings about those with too few steps.

    trainings: for each training section, the samples that it trains on.
    """
    easy = recipe.model.has_initial_weights or recipe.image.size <= _SMALL_IMAGE
    least = _FEW_STEPS_IF_EASY if easy else _FEW_STEPS
    notes, warnings = [], []
    for name, samples in trainings.items():
        section: TrainingConfig = recipe.section(name)
        per_epoch = count_steps(samples, recipe.batch.rows)
        epochs = fit_section(section, per_epoch).epochs
        what = "each fold" if name == "incv" else name
        if epochs > section.epochs:
            notes.append(
                f"{name}.min_steps = {section.min_steps}: {what} trains for {epochs} epochs instead of "
                f"{section.epochs}, because an epoch has {per_epoch} step(s)"
            )
        if epochs * per_epoch < least:
            warnings.append(
                f"{what} trains for only {epochs * per_epoch} steps ({epochs} epochs of {per_epoch}), which may be "
                f"too few to learn anything: set {name}.min_steps to {least} or more, raise {name}.epochs, or lower "
                "batch.global"
            )
    return notes, warnings


def micro_batches(rows: int, micro: int | None) -> list[slice]:
    """Split `rows` into as few slices of at most `micro` rows as possible; their sizes differ by at most one.

    They are nearly equal, because BatchNorm's variance over a last micro-batch of two or three rows would be useless.
    """
    count = 1 if micro is None else max(1, -(-rows // micro))
    return [slice(part * rows // count, (part + 1) * rows // count) for part in range(count)]


def batchnorm_rows(batch: int, world: int, micro: int | None) -> int:
    """Return the smallest number of rows that BatchNorm sees at once in a full step on S.

    batch: global batch size; world: number of ranks; micro: maximum rows of a micro-batch.
    """
    return min(part.stop - part.start for part in micro_batches(-(-batch // world), micro))
