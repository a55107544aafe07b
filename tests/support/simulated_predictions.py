"""Held-out predictions of simulated networks, with labels whose noise is known."""

import numpy as np

from tests.support.prediction_rows import rows
from trainer.incv.predictions import Predictions

CLASSES = 10


def symmetric(ratio: float, classes: int = CLASSES) -> np.ndarray:
    return np.full((classes, classes), ratio / (classes - 1)) + np.eye(classes) * (1 - ratio - ratio / (classes - 1))


def pair_flip(ratio: float, classes: int = CLASSES) -> np.ndarray:
    return (1 - ratio) * np.eye(classes) + ratio * np.roll(np.eye(classes), 1, axis=1)


def simulated(
    transition: np.ndarray, sharpness: float, count: int, seed: int
) -> tuple[Predictions, np.ndarray, np.ndarray]:
    """Held-out predictions of a network that has learnt the noisy posterior of images of varying difficulty.

    Each image belongs to its classes with probabilities from a softmax of noise and of `sharpness` for one class; the
    true label is drawn from them, the given label by the transition matrix. Returns predictions, given, true labels.
    """
    draws = np.random.default_rng(seed)
    classes = len(transition)
    logits = draws.normal(size=(count, classes))
    logits[np.arange(count), draws.integers(classes, size=count)] += sharpness * draws.gamma(2.0, size=count)
    clean = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    true = _drawn(clean, draws)
    given = _drawn(transition[true], draws)
    log_p = np.log(clean @ transition) + draws.normal(scale=0.1, size=(count, classes))
    p = np.exp(log_p) / np.exp(log_p).sum(axis=1, keepdims=True)
    order, every = np.argsort(-p, axis=1), np.arange(count)
    predictions = rows(
        every,
        order[:, 0] == given,
        fold=every % 2,
        predicted=order[:, 0],
        predicted_probability=p[every, order[:, 0]],
        given_probability=p[every, given],
        second=order[:, 1],
        second_probability=p[every, order[:, 1]],
        given_rank=(p > p[every, given][:, None]).sum(axis=1),
    )
    return predictions, given, true


def _drawn(p: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """One class of each row, with these probabilities."""
    return (p.cumsum(axis=1) < draws.random(len(p))[:, None]).sum(axis=1).clip(max=p.shape[1] - 1)
