"""Estimate the noise from how often the given label differs from predictions of growing confidence.

The more confident a held-out prediction, the rarer its mistakes, so the disagreement with the given labels falls
towards the noise ratio. Two effects bias that limit, and both show in the same predictions:

- Labels that are often flipped to one other class make the network predict that class. Predictions are therefore
  read with the label noise found so far: the true class is the one whose noise explains the two likeliest classes.
- Where noise is so strong that even the most confident predictions are often wrong, the limit is too high. Labels
  that are flipped at random also fall on the classes that the network thinks least likely, and at the same rate.

The assumption is that the noise depends on the true class alone, and consists of flips to classes that occur often
enough to be seen, and of flips at random.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.incv.measure import confusion_counts
from trainer.incv.predictions import Predictions

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

_CONFIDENT = 0.3
"""Share of the predictions of each class that count as confident when flips between classes are looked for."""
_LEAST_LIKELY = 0.1
"""Share of the classes, at least one, that are least likely to a network; the true class hardly ever is."""
_FEWEST_CLASSES = 5
"""With fewer classes, the least likely one is too often the true one to tell random flips from mistakes."""
_CLEAR = 3.0
"""Standard errors from which an excess of a label counts as a flip, and a bound as exceeded."""
_WOULD_SHOW = 4.0
"""Standard errors from which an excess would be found with near certainty: what is not found is then not there."""
_PASSES = 5
_BINS = 10
_EXPONENTS = (1.0, 2.0, 4.0, 8.0)
"""How disagreement may rise as confidence falls: as a power of the rank, from evenly to at the very end."""
_NO_WORSE = 1.0
"""Of the exponents whose fit is at most this much worse in chi squared, the highest is taken: the flattest limit."""
_SMALLEST = 1e-6


@dataclass(frozen=True)
class CurveEstimate:
    noise: float
    """ε."""
    transition: Floats
    """T with that noise: random flips, and the flips between classes that were found. [true, given]"""


@dataclass(frozen=True)
class RandomFlips:
    """Labels that are flipped to any class alike."""

    each: float
    """P(given label = k) for a class k that is not the true one, from random flips alone."""
    noise: float
    """Share of labels that are wrong because of them."""
    error: float
    """Standard error of `noise`."""


def estimate_from_confidence(predictions: Predictions, given: Ints, classes: int) -> CurveEstimate:
    """Estimate ε and T from held-out predictions. given: the given label of each row, [rows]; unusable rows
    are left out."""
    usable = predictions.usable()
    if not usable.any():
        return CurveEstimate(0.0, np.eye(classes))
    rows, given = predictions.rows(usable), given[usable]
    random = random_flips(rows.given_rank, classes)
    reading = _Reading(rows, classes)
    transition, flipped = _find_flips(reading, given, random.each)
    true_class, margin = reading.true_class(transition)
    rank = confidence_ranks(true_class, margin, rows.fold)
    noise = limit_of_disagreement(given != true_class, rank)
    if classes >= _FEWEST_CLASSES:
        noise = _bounded(noise, random, flipped, len(given), classes)
    prior = np.bincount(true_class, minlength=classes) / len(given)
    return CurveEstimate(noise, rescale_noise(transition, prior, noise))


def rescale_noise(transition: Floats, prior: Floats, noise: float) -> Floats:
    """Scale the wrong labels of a transition matrix to a noise ratio; a row has at most all its labels wrong."""
    classes = len(transition)
    wrong = transition * (1.0 - np.eye(classes))
    total = float(prior @ wrong.sum(axis=1))
    wrong = wrong * (noise / total) if total > 0.0 else (1.0 - np.eye(classes)) * noise / max(classes - 1, 1)
    wrong /= np.maximum(wrong.sum(axis=1, keepdims=True), 1.0)
    return wrong + np.diag(np.maximum(1.0 - wrong.sum(axis=1), 0.0))


def random_flips(given_rank: Ints, classes: int) -> RandomFlips:
    """Measure random flips: how often the given label is among the classes that the network thinks least likely.

    given_rank: number of classes that are likelier than the given label, [rows].
    """
    least = max(1, round(_LEAST_LIKELY * classes))
    share = float((given_rank >= classes - least).mean())
    each = share / least
    error = float(np.sqrt(share * (1.0 - share) / len(given_rank))) / least
    return RandomFlips(each, (classes - 1) * each, (classes - 1) * error)


def confidence_ranks(true_class: Ints, margin: Floats, fold: Ints) -> Floats:
    """Rank the rows of each class and fold by their margin: from 0, the most confident, to 1, the least. [rows]"""
    order = np.lexsort((-margin, true_class, fold))
    group = np.stack([fold[order], true_class[order]])
    starts = np.flatnonzero(np.r_[True, (group[:, 1:] != group[:, :-1]).any(axis=0)])
    sizes = np.diff(np.r_[starts, len(order)])
    ranks = np.empty(len(order))
    ranks[order] = (np.arange(len(order)) - np.repeat(starts, sizes) + 0.5) / np.repeat(sizes, sizes)
    return ranks


def limit_of_disagreement(disagrees: npt.NDArray[np.bool_], rank: Floats) -> float:
    """Return the disagreement in the limit of full confidence, by a fit of a + b * rank^p with a, b >= 0.

    disagrees: whether the given label differs, [rows]; rank: of the confidence, from 0 (most confident) to 1, [rows].
    """
    bins = np.minimum((rank * _BINS).astype(np.int64), _BINS - 1)
    count = np.bincount(bins, minlength=_BINS)
    share = np.bincount(bins, weights=disagrees, minlength=_BINS) / np.maximum(count, 1)
    # One more row of each kind keeps the variance of a bin without disagreement above zero.
    smoothed = (share * count + 1.0) / (count + 2.0)
    weight = np.where(count > 0, count / (smoothed * (1.0 - smoothed)), 0.0)
    fits = [_fit(share, weight, exponent) for exponent in _EXPONENTS]
    best = min(misfit for misfit, _ in fits)
    return next(limit for misfit, limit in reversed(fits) if misfit <= best + _NO_WORSE)


def _fit(share: Floats, weight: Floats, exponent: float) -> tuple[float, float]:
    """Fit the shares of disagreement by weighted least squares; return chi squared and the limit."""
    edges = np.linspace(0.0, 1.0, _BINS + 1) ** (exponent + 1.0)
    mean_power = np.diff(edges) * _BINS / (exponent + 1.0)
    design = np.stack([np.ones(_BINS), mean_power], axis=1)
    normal = design.T @ (weight[:, None] * design)
    limit, slope = np.linalg.pinv(normal) @ (design.T @ (weight * share))
    if slope < 0.0:
        limit, slope = float(weight @ share / weight.sum()), 0.0
    if limit < 0.0:
        limit, slope = 0.0, float(weight @ (mean_power * share) / (weight @ mean_power**2))
    misfit = weight @ (share - limit - slope * mean_power) ** 2
    return float(misfit), float(min(limit, 1.0))


class _Reading:
    """The two likeliest classes of each row, read as noisy labels of a true class."""

    def __init__(self, rows: Predictions, classes: int) -> None:
        self.classes, self.fold = classes, rows.fold
        self._first, self._second = rows.predicted.astype(np.int64), rows.second.astype(np.int64)
        likeliest, next_ = rows.predicted_probability.astype(np.float64), rows.second_probability.astype(np.float64)
        others = (1.0 - likeliest - next_) / max(classes - 2, 1)
        self._logs = tuple(np.log(np.maximum(each, _SMALLEST)) for each in (likeliest, next_, others))

    def true_class(self, transition: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return the likelier true class of the two, and by how much: the one whose row of the transition matrix
        has the smaller cross-entropy with the predicted probabilities. Both [rows]."""
        first = self._score(transition, self._first)
        second = self._score(transition, self._second)
        return np.where(first >= second, self._first, self._second), np.abs(first - second)

    def _score(self, transition: Floats, of: npt.NDArray[np.int64]) -> Floats:
        first, second = transition[of, self._first], transition[of, self._second]
        likeliest, next_, others = self._logs
        return first * likeliest + second * next_ + (1.0 - first - second) * others


def _find_flips(reading: _Reading, given: Ints, random: float) -> tuple[Floats, float]:
    """Find labels that a class is flipped to more often than at random, in its most confident predictions.

    random: P(given label = k) from random flips. Returns the transition matrix, [true, given], and the share of all
    labels that these flips make wrong.
    """
    classes = reading.classes
    transition, flipped = np.eye(classes), 0.0
    for _ in range(_PASSES):
        true_class, margin = reading.true_class(transition)
        confident = confidence_ranks(true_class, margin, reading.fold) < _CONFIDENT
        counts = confusion_counts(true_class[confident], given[confident], classes)
        rows = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
        share = counts / rows
        variance = np.maximum(share * (1.0 - share), random * (1.0 - random) + 1.0 / rows) / rows
        excess = np.where(share - random > _CLEAR * np.sqrt(variance), share - random, 0.0)
        np.fill_diagonal(excess, 0.0)
        flipped = float(np.bincount(true_class, minlength=classes) @ excess.sum(axis=1) / len(given))
        before, transition = transition, random + excess
        np.fill_diagonal(transition, 0.0)
        np.fill_diagonal(transition, np.maximum(1.0 - transition.sum(axis=1), _SMALLEST))
        if np.array_equal(before, transition):
            break
    return transition, flipped


def _bounded(level: float, random: RandomFlips, flipped: float, rows: int, classes: int) -> float:
    """Return the limit of disagreement, or the noise that random and found flips explain, if it is clearly above.

    The rest of the limit is then mistakes of the network: as flips to one class it would have been found.
    """
    explained = random.noise + flipped
    rest = level - explained
    confident = _CONFIDENT * rows
    error = np.hypot(random.error, np.sqrt(level * (1.0 - level) / confident))
    one_class = random.each + rest
    would_show = rest > _WOULD_SHOW * np.sqrt(max(one_class * (1.0 - one_class), 0.0) * classes / confident)
    return explained if rest > _CLEAR * error and would_show else level
