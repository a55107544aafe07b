"""Synthetic held-out predictions, for tests that need no network."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.incv.predictions import Predictions, Status


def rows(
    sample_id: Sequence[int] | np.ndarray,
    agrees: Sequence[bool] | np.ndarray,
    loss: Sequence[float] | np.ndarray | float = 1.0,
    *,
    fold: Any = 0,
    predicted: Any = 0,
    given_probability: Any = 0.5,
    predicted_probability: Any = 0.5,
    second: Any = 1,
    second_probability: Any = 0.25,
    given_rank: Any = 0,
    status: Any = Status.OK,
) -> Predictions:
    """Predictions in the order given; a scalar serves for every row. Unusable rows are as `collect` writes them."""
    count = len(sample_id)

    def column(values: Any, kind: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, kind), (count,)).copy()

    states = column(status, np.int8)
    unusable = states != Status.OK
    columns = {
        "predicted": column(predicted, np.int32),
        "agrees": column(agrees, np.bool_),
        "loss": column(loss, np.float32),
        "given_probability": column(given_probability, np.float32),
        "predicted_probability": column(predicted_probability, np.float32),
        "second": column(second, np.int32),
        "second_probability": column(second_probability, np.float32),
        "given_rank": column(given_rank, np.int32),
    }
    nothing = {"predicted": -1, "agrees": False, "second": -1, "given_rank": -1}
    for name, values in columns.items():
        values[unusable] = nothing.get(name, np.nan)
    return Predictions(np.asarray(sample_id, np.int64), column(fold, np.int8), **columns, status=states)


def shuffled(predictions: Predictions, seed: int) -> Predictions:
    order = np.random.default_rng(seed).permutation(len(predictions.sample_id))
    return Predictions(**{name: getattr(predictions, name)[order] for name in Predictions.__dataclass_fields__})
