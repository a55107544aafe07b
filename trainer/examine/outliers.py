"""Thresholds that follow from the distribution of a score in the data set at hand."""

from typing import Any

import numpy as np
import numpy.typing as npt


def robust_limit(values: npt.NDArray[Any], deviations: float = 4.0) -> float:
    """Return the value above which values are unusual: the median plus so many robust standard deviations.

    The standard deviation is that of a normal distribution with the same distance from the median to the quantile
    0.84: half of the data may be anything, such as duplicates or bad pictures. Infinity if there are no values.
    """
    if not len(values):
        return np.inf
    middle, upper = np.quantile(values, [0.5, 0.8413])
    return float(middle + deviations * max(upper - middle, 0.02 * abs(middle), 1e-6))
