"""The paper's formulas: agreement, label precision and label recall from a noise matrix, and their inverse."""

# Symbols: T float64 [c, c], T_ij = P(given label j | true class i); prior float64 [c], π_i, the share or count of
# true class i (priors are normalised here). ε is a noise ratio, c the number of classes. Equation numbers are the
# paper's. A ratio with a zero denominator is nan, without a warning.

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

NoiseKind = Literal["symmetric", "asymmetric"]
Array = NDArray[np.float64]

# Loose enough for matrices written in YAML with a few decimals; a missing entry causes a far larger error.
ROW_SUM_TOLERANCE = 1e-6


# --- noise matrices -----------------------------------------------------------------------------------------


def symmetric_transition(ratio: float, classes: int) -> Array:
    """Symmetric noise of Definition 1: T_ii = 1 - ε and T_ij = ε/(c-1) for all j ≠ i; float64 [c, c]."""
    _check_ratio(ratio)
    _check_classes(classes)
    matrix = np.full((classes, classes), ratio / (classes - 1))
    np.fill_diagonal(matrix, 1.0 - ratio)
    return matrix


def inclusive_symmetric_transition(ratio: float, classes: int) -> Array:
    """Labels redrawn with probability ε from all classes, the true one included: T_ij = ε/c for j ≠ i.

    float64 [c, c]. The share of wrong labels is ε(c-1)/c.
    """
    return symmetric_transition(ratio * (classes - 1) / classes, classes)


def mapped_transition(ratio: float, targets: Mapping[int, int], classes: int) -> Array:
    """Noise between similar classes: T_ii = 1 - ε and T_ij = ε for a class i with the target j; else T_ii = 1."""
    _check_ratio(ratio)
    matrix = np.eye(classes)
    for source, target in targets.items():
        matrix[source, source] -= ratio
        matrix[source, target] += ratio
    return matrix


def asymmetric_transition(ratio: float, classes: int) -> Array:
    """Asymmetric noise of Definition 1 (pair flips): T_ii = 1 - ε and T_ij = ε for j = i+1 mod c; float64 [c, c]."""
    _check_ratio(ratio)
    _check_classes(classes)
    identity = np.eye(classes)
    return (1.0 - ratio) * identity + ratio * np.roll(identity, 1, axis=1)


def check_transition(T: ArrayLike) -> None:
    """Raise ValueError, naming the row, unless T is square and each row is a probability distribution."""
    matrix = np.asarray(T, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"a noise matrix must be square [classes, classes]; this one has shape {matrix.shape}")
    for row, entries in enumerate(matrix):
        # Written so that nan fails too: every comparison with nan is false.
        outside = np.flatnonzero(~((entries >= 0.0) & (entries <= 1.0)))
        if outside.size:
            column = int(outside[0])
            raise ValueError(f"row {row} of the noise matrix: entry {column} is {entries[column]:g}, outside [0, 1]")
        total = float(entries.sum())
        if abs(total - 1.0) > ROW_SUM_TOLERANCE:
            raise ValueError(
                f"row {row} of the noise matrix sums to {total:.9g}, but must sum to 1: "
                f"it is the distribution of the given labels of true class {row}"
            )


# --- agreement of predictions with given labels, Prop. 1 ----------------------------------------------------


def accuracy(T: ArrayLike, prior: ArrayLike) -> float:
    """Agreement of predictions y_f with given labels y (Eq. 2, proof of Cor. 1.1): P(y_f = y) = Σ_i π_i Σ_j T_ij²."""
    matrix = _transition(T)
    return float(_prior(prior, len(matrix)) @ (matrix**2).sum(axis=1))


def noise_from_accuracy(accuracy: float, classes: int, kind: NoiseKind = "symmetric", top_k: int = 1) -> float:
    """Invert Eq. 4 or Eq. 5: return the smaller ε for which the agreement equals `accuracy`.

    Both equations have the form (1-ε)² + ε²/(m-1) = accuracy. For symmetric noise m = c/top_k, and agreement means
    that the given label is among the top k. For asymmetric noise m = 2, and top_k must be 1, since the top 2 always
    contain a pair-flipped label. The smallest possible agreement is 1/m, at ε = (m-1)/m; that ε is also returned for
    any lower agreement. An agreement above 1 gives 0.
    """
    _check_classes(classes)
    if math.isnan(accuracy):
        raise ValueError("the agreement is nan: no noise ratio can be estimated from it")
    if kind == "asymmetric" and top_k != 1:
        raise ValueError(f"asymmetric noise cannot be estimated from top-{top_k} agreement; use top_k = 1")
    if not 1 <= top_k < classes:
        raise ValueError(f"top_k is {top_k}; it must be at least 1 and less than the number of classes ({classes})")
    m = classes / top_k if kind == "symmetric" else 2.0
    if accuracy >= 1.0:
        return 0.0
    if accuracy <= 1.0 / m:
        return (m - 1.0) / m
    # The roots of ε² m/(m-1) - 2ε + (1-A) = 0 are (m-1)/m (1 ± √d), with product (1-A)(m-1)/m. Dividing the
    # product by the larger root gives the smaller one without the cancellation of 1 - √d near A = 1.
    d = max((m * accuracy - 1.0) / (m - 1.0), 0.0)
    return (1.0 - accuracy) / (1.0 + math.sqrt(d))


# --- quality of one round's selection, Prop. 2 --------------------------------------------------------------


def label_precision(T: ArrayLike, prior: ArrayLike) -> float:
    """Label precision (Eq. 6 with Eq. 3): LP = Σ_i π_i T_ii² / Σ_i π_i Σ_j T_ij². Special cases: Eq. 10, Eq. 11."""
    return label_precision_after(T, prior, rounds=1)


def label_recall(T: ArrayLike, prior: ArrayLike) -> float:
    """Label recall (Eq. 6 with Eq. 3): LR = Σ_i π_i T_ii² / Σ_i π_i T_ii; nan if no label is correct."""
    return label_recall_after(T, prior, rounds=1)


def noise_of_selected(ratio: float, classes: int, kind: NoiseKind) -> float:
    """Noise ratio of the selected samples (Cor. 2.2): ε_S = 1 - LP = ε² / (ε² + k(1-ε)²).

    k = c-1 for symmetric noise (Eq. 10), 1 for asymmetric noise (Eq. 11).
    """
    _check_ratio(ratio)
    _check_classes(classes)
    k = classes - 1 if kind == "symmetric" else 1
    return ratio**2 / (ratio**2 + k * (1.0 - ratio) ** 2)


def most_noise_of_selected(agreement: float, classes: int, kind: NoiseKind) -> float:
    """The highest ε_S that a network can have whose held-out predictions agree with this share of the labels.

    Not in the paper. A label is right with probability u, a prediction with probability a, and two that are wrong are
    equal with probability 1/(m-1) (at most, for asymmetric noise): the agreement is A = ua + (1-u)(1-a)/(m-1), with
    m = c for symmetric noise and 2 for asymmetric. Hence ua = ((m-1) A - 1 + u + a) / m, and the label precision ua/A
    is lowest where u + a is: at u = a, which is the network that memorises. Valid if both are right more often than
    by chance.
    """
    return noise_of_selected(noise_from_accuracy(agreement, classes, kind), classes, kind)


# --- several rounds (not in the paper) ----------------------------------------------------------------------


def label_recall_after(T: ArrayLike, prior: ArrayLike, rounds: int) -> float:
    """Label recall after k rounds: LR_k = Σ_i π_i T_ii (1-(1-T_ii)^k) / Σ_i π_i T_ii; nan if no label is correct.

    Prop. 2 covers one round. This extends it to k rounds, for a network that memorises: its predictions are drawn
    independently from T in each round, and no sample is removed (r = 0).
    """
    matrix = _transition(T)
    weights = _prior(prior, len(matrix))
    selected = _selected_after(matrix, rounds)
    return _ratio(np.diag(selected), np.diag(matrix), weights)


def label_precision_after(T: ArrayLike, prior: ArrayLike, rounds: int) -> float:
    """Label precision after k rounds: LP_k = Σ_i π_i T_ii (1-(1-T_ii)^k) / Σ_i π_i Σ_j T_ij (1-(1-T_ij)^k).

    The assumptions are those of `label_recall_after`. nan after 0 rounds, when nothing is selected.
    """
    matrix = _transition(T)
    weights = _prior(prior, len(matrix))
    selected = _selected_after(matrix, rounds)
    return _ratio(np.diag(selected), selected.sum(axis=1), weights)


def _selected_after(matrix: Array, rounds: int) -> Array:
    """P(label j, selected within k rounds | true class i) = T_ij (1-(1-T_ij)^k); float64 [c, c]."""
    if rounds < 0:
        raise ValueError(f"rounds is {rounds}, but it cannot be negative")
    return matrix * (1.0 - (1.0 - matrix) ** rounds)


# --- checked inputs -----------------------------------------------------------------------------------------


def _transition(T: ArrayLike) -> Array:
    check_transition(T)
    return np.asarray(T, dtype=np.float64)


def _prior(prior: ArrayLike, classes: int) -> Array:
    weights = np.asarray(prior, dtype=np.float64)
    if weights.shape != (classes,):
        raise ValueError(f"the prior has shape {weights.shape}, but the noise matrix has {classes} classes")
    if not (np.isfinite(weights).all() and (weights >= 0.0).all() and weights.sum() > 0.0):
        raise ValueError("the prior must contain finite, non-negative shares or counts of the classes, not all 0")
    return weights / weights.sum()


def _ratio(part: Array, whole: Array, weights: Array) -> float:
    """Return Σ_i π_i part_i / Σ_i π_i whole_i: Eq. 6 counts samples, so classes are summed before dividing."""
    total = float(weights @ whole)
    return float(weights @ part) / total if total > 0.0 else math.nan


def _check_ratio(ratio: float) -> None:
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"the noise ratio is {ratio:g}, outside [0, 1]")


def _check_classes(classes: int) -> None:
    if classes < 2:
        raise ValueError(f"the number of classes is {classes}, but label noise needs at least 2")
