"""Measures that compare labels with the true ones: realised noise, label precision and recall, confusion matrix."""

import math

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.integer]
Mask = NDArray[np.bool_]


def realised_noise(true: Labels, given: Labels) -> float:
    """Return the share of wrong labels; nan if there are no samples. true, given: integers [n]."""
    return _share(np.count_nonzero(true != given), len(true))


def class_prior(true: Labels, classes: int) -> NDArray[np.float64]:
    """Return P(true = i) for each class i: float64 [classes]; nan if there are no samples."""
    counts = np.bincount(true, minlength=classes).astype(np.float64)
    return _shares(counts, np.full(classes, counts.sum()))


def confusion(true: Labels, labels: Labels, classes: int) -> NDArray[np.float64]:
    """Return P(label = j | true = i): float64 [classes, classes]; the row of a class without samples is nan.

    With given labels this is the paper's T; with held-out predictions it is M, which equals T by Claim 1.
    """
    counts = confusion_counts(true, labels, classes).astype(np.float64)
    return _shares(counts, np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape))


def confusion_counts(true: Labels, labels: Labels, classes: int) -> NDArray[np.int64]:
    """Count the samples of true class i with label j: int64 [classes, classes]; ignores unknown labels (-1)."""
    known = (true >= 0) & (labels >= 0)
    pairs = true[known].astype(np.int64) * classes + labels[known]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def label_precision(true: Labels, given: Labels, selected: Mask) -> float:
    """LP of Eq. 6: the share of selected samples whose label is correct; nan if the selection is empty."""
    right = true == given
    return _share(np.count_nonzero(right & selected), np.count_nonzero(selected))


def label_recall(true: Labels, given: Labels, selected: Mask) -> float:
    """LR of Eq. 6: the share of correctly labelled samples that are selected; nan if there are none."""
    right = true == given
    return _share(np.count_nonzero(right & selected), np.count_nonzero(right))


def label_precision_by_class(true: Labels, given: Labels, selected: Mask, classes: int) -> NDArray[np.float64]:
    """LP_i of Eq. 7 for each true class i: float64 [classes]; nan if no sample of the class is selected."""
    right = true == given
    return _shares(_count(true, right & selected, classes), _count(true, selected, classes))


def label_recall_by_class(true: Labels, given: Labels, selected: Mask, classes: int) -> NDArray[np.float64]:
    """LR_i of Eq. 7 for each true class i: float64 [classes]; nan if no label of the class is correct."""
    right = true == given
    return _shares(_count(true, right & selected, classes), _count(true, right, classes))


def or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite, because JSON has no nan."""
    return float(value) if math.isfinite(value) else None


def _count(true: Labels, where: Mask, classes: int) -> NDArray[np.float64]:
    return np.bincount(true[where], minlength=classes).astype(np.float64)


def _share(part: int | np.integer, whole: int | np.integer) -> float:
    return float(part / whole) if whole else math.nan


def _shares(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
