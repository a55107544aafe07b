"""The table of held-out probabilities: a column `key`, and one for each class."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

KEY = "key"


def class_columns(names: Sequence[str]) -> list[str]:
    """Return the column of each class: its name, but `_key` for a class `key`, with as many `_` as it takes."""
    columns = list(names)
    if KEY in columns:
        other = f"_{KEY}"
        while other in columns:
            other = f"_{other}"
        columns[columns.index(KEY)] = other
    return columns


def build_probability_table(
    keys: Sequence[str], probabilities: npt.NDArray[np.floating], names: Sequence[str]
) -> pa.Table:
    """Return the table. probabilities: [keys, classes]; names: of the classes."""
    columns = dict(zip(class_columns(names), np.asarray(probabilities).T, strict=True))
    return pa.table({KEY: pa.array(keys, pa.string())} | {name: pa.array(each) for name, each in columns.items()})
