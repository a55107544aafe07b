"""Confident learning: which held-out predictions are confident, and what they tell of the true labels."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.incv.measure import confusion_counts

SUSPICIOUS = 1.0
"""Suspicion above which a label that the prediction contradicts is doubted: mistakes of the predictions are mostly
closer calls (benchmarks/results/label_issues.jsonl)."""


def confident_joint(
    given: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int32],
    given_probability: npt.NDArray[np.float32],
    predicted_probability: npt.NDArray[np.float32],
    classes: int,
) -> npt.NDArray[np.float64]:
    """Estimate the joint distribution of given and true labels, [classes, classes], by confident learning.

    Only confident predictions are counted. Each row is then scaled to the number of samples with that given label
    (Northcutt et al. 2021).
    """
    held = np.bincount(given, minlength=classes)
    sure = are_confident(given, predicted, given_probability, predicted_probability, classes)
    counts = confusion_counts(given[sure], predicted[sure], classes).astype(np.float64)
    empty = counts.sum(axis=1) == 0
    counts[empty] = np.eye(classes)[empty]  # no evidence against these labels
    counts *= (held / counts.sum(axis=1))[:, None]
    return np.asarray(counts / max(int(held.sum()), 1))


def are_confident(
    given: npt.NDArray[np.integer],
    predicted: npt.NDArray[np.int32],
    given_probability: npt.NDArray[np.float32],
    predicted_probability: npt.NDArray[np.float32],
    classes: int,
) -> npt.NDArray[np.bool_]:
    """Return which predictions are confident, bool [rows].

    A prediction of class j is, if its probability is at least the mean probability of j over the samples with given
    label j.
    """
    held = np.bincount(given, minlength=classes)
    total = np.bincount(given, weights=given_probability, minlength=classes)
    threshold = np.divide(total, held, out=np.full(classes, np.inf), where=held > 0)
    return np.asarray(predicted_probability >= threshold[predicted])


def are_doubted(loss: npt.NDArray[np.floating[Any]], agrees: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which labels are doubted that predictions contradict: bool [rows]. loss: suspicion as a loss."""
    return np.asarray((loss > math.log1p(math.exp(SUSPICIOUS))) & ~agrees)
