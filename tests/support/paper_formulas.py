"""Formulas of the paper that the product does not use, to check those that it does."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def symmetric_accuracy(ratio: float, classes: int) -> float:
    """Agreement under symmetric noise (Eq. 4)."""
    return (1.0 - ratio) ** 2 + ratio**2 / (classes - 1)


def asymmetric_accuracy(ratio: float) -> float:
    """Agreement under asymmetric noise (Eq. 5)."""
    return (1.0 - ratio) ** 2 + ratio**2


def accuracy_per_class(transition: npt.ArrayLike) -> Array:
    """Agreement by true class i (Eq. 2): P(y_f = y | i) = Σ_j T_ij²; [c]."""
    return (np.asarray(transition, np.float64) ** 2).sum(axis=1)


def label_precision_per_class(transition: npt.ArrayLike) -> Array:
    """Label precision among the selected of true class i (Eq. 7, 8): LP_i = T_ii² / Σ_j T_ij²; [c]."""
    matrix = np.asarray(transition, np.float64)
    return np.diag(matrix) ** 2 / (matrix**2).sum(axis=1)


def label_recall_per_class(transition: npt.ArrayLike) -> Array:
    """Label recall among clean samples of true class i (Eq. 7, 8): LR_i = T_ii; [c]."""
    return np.diag(np.asarray(transition, np.float64))


def label_precision_bounds(t_ii: float, classes: int) -> tuple[float, float]:
    """The smallest (asymmetric noise) and largest (symmetric noise) LP_i for a given T_ii (Eq. 9)."""
    right, wrong = t_ii**2, (1.0 - t_ii) ** 2
    return right / (right + wrong), right / (right + wrong / (classes - 1))
