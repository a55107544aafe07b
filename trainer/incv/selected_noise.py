"""The noise of the samples whose given label a held-out prediction agrees with, from what the network gets right."""

import numpy as np
import numpy.typing as npt

from trainer.incv.measure import confusion_counts

_SINGULAR = 1e-6
"""Directions of T in which it shrinks more than this tell nothing of the true class."""
_CONTRADICTION = 0.05
"""How far beyond 0 or 1 a share may be because T is an estimate."""


def noise_of_agreeing(
    given: npt.NDArray[np.integer], predicted: npt.NDArray[np.integer], transition: npt.NDArray[np.float64]
) -> float | None:
    """Estimate ε_S = 1 - LP as Prop. 2 does, with the network's own confusion matrix M instead of M = T.

    A held-out prediction depends on the given label only through the true class i, so the counts of given label j and
    predicted class k are Σ_i T_ij P(i, k). Solved for P(i, k), they tell how often a prediction is right, and with T
    how often the label is right where both agree. given, predicted: [rows]; transition: T, [true, given].
    Returns 0 if no prediction agrees, and None if T contradicts the predictions: if more than all of the labels that
    agree, or fewer than none, would have to be right. That happens where T is nearly singular, at very high noise.
    """
    joint = confusion_counts(given, predicted, len(transition)).astype(np.float64)
    agreeing = float(np.trace(joint))
    if agreeing == 0.0:
        return 0.0
    by_true_class = np.linalg.lstsq(transition.T, joint, rcond=_SINGULAR)[0]
    right = float(np.diag(transition) @ np.diag(by_true_class))
    wrong = 1.0 - right / agreeing
    return float(np.clip(wrong, 0.0, 1.0)) if -_CONTRADICTION <= wrong <= 1.0 + _CONTRADICTION else None
