"""Features and predictions that the user computed: reads and checks `incv.features_file`, `incv.predictions_file`."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shards.durable import hash_file
from shards.errors import DataError, Fix, describe_unreadable, list_some
from shards.regular_file import find_kind, read_regular
from shards.sample_index import SampleIndex
from trainer.config.schema import Recipe
from trainer.incv.arrays import require_probabilities
from trainer.incv.probability_table import KEY, class_columns
from trainer.loading.sample_order import Ids
from trainer.records.stored_labels import Labels

FEATURES, PREDICTIONS = "incv.features_file", "incv.predictions_file"
_MAGIC = b"\x93NUMPY"
_SUFFIXES = (".npy", ".parquet")
_ROWS = 2**16
"""Rows that are checked at a time."""
_EXTREME = 2.0**20
"""Features whose largest number is beyond this, or below its inverse, are scaled by a power of two."""
_log = logging.getLogger(__name__)


def given_files(recipe: Recipe) -> dict[str, Path]:
    """Return the files of features and predictions that a recipe names, by recipe key."""
    if recipe.incv is None:
        return {}
    named = {FEATURES: recipe.incv.features_file, PREDICTIONS: recipe.incv.predictions_file}
    return {key: Path(path) for key, path in named.items() if path is not None}


def given_checksum(key: str, path: Path) -> str:
    """Return the SHA-256 of a file. key: its recipe key."""
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path} is not a .npy or .parquet file", field=key, fix="save the array with numpy.save or as Parquet"
        )
    try:
        return hash_file(path)
    except DataError as error:
        raise DataError(error.problem, field=key, fix=error.fixes) from None
    except OSError as error:
        raise DataError(describe_unreadable("the file", path, error), field=key) from error


def check_given(recipe: Recipe, index: SampleIndex, ids: Ids, labels: Labels) -> None:
    """Raise DataError if a file of features or predictions cannot be used for the samples `ids`."""
    paths = given_files(recipe)
    if FEATURES in paths:
        _check_features(_open(FEATURES, paths[FEATURES], index, ids))
    if PREDICTIONS in paths:
        read_predictions(paths[PREDICTIONS], index, ids, labels)


def read_features(path: Path, index: SampleIndex, ids: Ids) -> npt.NDArray[np.floating]:
    """Return the features of samples, float16 as in the file or float32: [ids, features]."""
    matrix = _open(FEATURES, path, index, ids)
    scale = 2.0 ** -math.frexp(matrix.largest())[1]
    keep = _EXTREME**-1 < scale < _EXTREME
    pieces = [
        piece if piece.dtype == np.float16 and keep else (piece * (1.0 if keep else scale)).astype(np.float32)
        for piece in matrix.pieces()
    ]
    return np.concatenate(pieces)


def read_predictions(path: Path, index: SampleIndex, ids: Ids, labels: Labels) -> npt.NDArray[np.float32]:
    """Return the probabilities of all classes: float32 [ids, classes]. labels: the given ones."""
    matrix = _open(PREDICTIONS, path, index, ids, index.class_names)
    if matrix.width != index.num_classes:
        raise matrix.error(
            f"it has {matrix.width:,} columns, but the data set has {index.num_classes:,} classes "
            f"({list_some(index.class_names)})",
            "save one column for each class, in this order",
        )
    values = np.concatenate([piece.astype(np.float64) for piece in matrix.pieces()])
    try:
        return require_probabilities(labels, values, matrix.name_of).astype(np.float32)
    except DataError as error:
        raise matrix.error(error.problem) from None


@dataclass(frozen=True, eq=False)
class _Matrix:
    """The numbers of a file, of which some rows are those of the samples of a run."""

    key: str
    path: Path
    values: npt.NDArray[Any]
    rows: npt.NDArray[np.int64]
    index: SampleIndex
    ids: Ids

    @property
    def width(self) -> int:
        return int(self.values.shape[1])

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        for first in range(0, len(self.rows), _ROWS):
            yield np.asarray(self.values[self.rows[first : first + _ROWS]])

    def largest(self) -> float:
        """Return the largest absolute value."""
        return max(float(np.abs(piece.astype(np.float64)).max()) for piece in self.pieces())

    def name_of(self, row: int) -> str:
        return self.index.keys(self.ids[row : row + 1])[0]

    def error(self, problem: str, *fixes: str | Fix) -> DataError:
        return DataError(f"{self.path}: {problem}", field=self.key, fix=fixes)


def _check_features(matrix: _Matrix) -> None:
    """Raise DataError for numbers that are not finite and for rows that are all equal; warn of constant columns."""
    low = high = None
    first = 0
    for piece in matrix.pieces():
        if len(bad := np.flatnonzero(~np.isfinite(piece.astype(np.float64)).all(axis=1))):
            name = matrix.name_of(first + int(bad[0]))
            raise matrix.error(
                f"the features of {name} hold NaN or infinity",
                "compute them again, or leave the image out with labels.corrections",
            )
        lowest, highest = piece.min(axis=0), piece.max(axis=0)
        low = lowest if low is None else np.minimum(low, lowest)
        high = highest if high is None else np.maximum(high, highest)
        first += len(piece)
    assert low is not None
    assert high is not None
    if (constant := int((low == high).sum())) == matrix.width:
        raise matrix.error("all rows are equal, so they say nothing about the images", "compute the features again")
    if constant:
        _log.warning("%s: %s of %s columns are the same for all images", matrix.path, constant, matrix.width)


def _open(key: str, path: Path, index: SampleIndex, ids: Ids, names: Sequence[str] = ()) -> _Matrix:
    """Open a file, and find the rows of the samples `ids`. names: of its columns, if they have names."""
    if kind := find_kind(path, follow=True):
        raise DataError(f"{path} is {kind}, not a regular file", field=key, fix="name another file")
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        values, keys = _read_parquet(path, names) if is_parquet else (_read_npy(path), None)
    except (DataError, OSError, ValueError, EOFError, pa.ArrowException) as error:
        problem = error.problem if isinstance(error, DataError) else f"it cannot be read ({str(error)[:200]})"
        fix = "" if is_parquet else "save one array of numbers: numpy.save(path, array.astype('float32'))"
        raise DataError(f"{path}: {problem}", field=key, fix=fix) from None
    if values.ndim != 2 or not values.shape[1]:
        raise DataError(
            f"{path}: its shape is {list(values.shape)}, not [images, columns]",
            field=key,
            fix="save one row of numbers for each image",
        )
    if values.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: its numbers are of the type {values.dtype}", field=key, fix="save them as float32 or float16"
        )
    if keys is None:
        rows = ids
        if len(values) != len(index):
            order = index.folder / "index.parquet"
            raise DataError(
                f"{path} has {len(values):,} rows, but the data set has {len(index):,} images",
                field=key,
                fix=[
                    f"save one row for each in the order of {order}, column `key`",
                    "use Parquet with a column `key`",
                ],
            )
    else:
        rows = _match(path, key, keys, index, ids)
    return _Matrix(key, path, values, rows, index, ids)


def _read_npy(path: Path) -> npt.NDArray[Any]:
    if read_regular(path, len(_MAGIC)) != _MAGIC:
        raise DataError("it is no .npy file")
    values: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return values


def _read_parquet(path: Path, names: Sequence[str]) -> tuple[npt.NDArray[Any], list[str]]:
    """Return the numbers and the keys. names: columns to return in this order, unless there is one list column."""
    table = pq.read_table(path, partitioning=None)
    if table.column_names.count(KEY) != 1:
        raise DataError(f"it needs a column `{KEY}` of image keys; its columns are {list_some(table.column_names)}")
    if not (pa.types.is_string(table[KEY].type) or pa.types.is_large_string(table[KEY].type)):
        raise DataError(f"its column `{KEY}` is {table[KEY].type}, not text")
    keys = table[KEY].to_pylist()
    others = [name for name in table.column_names if name != KEY]
    if len(others) == 1 and _is_list(table[others[0]].type):
        return _read_lists(table[others[0]].combine_chunks(), others[0]), keys
    if names:
        columns = class_columns(names)
        if missing := [name for name in columns if name not in others]:
            raise DataError(f"it has no column for the class {list_some(missing)}; name a column by each class")
        if unknown := [name for name in others if name not in columns]:
            raise DataError(f"its column {list_some(unknown)} is no class; classes are {list_some(names, 5)}")
        others = columns
    if odd := [name for name in others if not _is_number(table[name].type)]:
        raise DataError(f"its column {list_some(odd)} holds no numbers; keep `{KEY}` and the numbers only")
    if holes := [name for name in others if table[name].null_count]:
        raise DataError(f"its column {list_some(holes)} has empty cells; fill them, or leave these rows out")
    arrays = [table[name].to_numpy() for name in others]
    return (np.stack(arrays, axis=1) if arrays else np.zeros((len(keys), 0))), keys


def _read_lists(column: Any, name: str) -> npt.NDArray[Any]:
    if column.null_count:
        raise DataError(f"its column {name} has empty cells; leave these rows out")
    lengths = np.unique(np.diff(column.offsets.to_numpy())) if not pa.types.is_fixed_size_list(column.type) else [0]
    if len(lengths) > 1:
        raise DataError(f"its column {name} has lists of {lengths[0]} to {lengths[-1]} numbers; they must be equal")
    numbers = column.flatten()
    if not _is_number(numbers.type) or numbers.null_count:
        raise DataError(f"its column {name} holds lists of {numbers.type}, some empty, instead of numbers")
    return numbers.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind)


def _match(path: Path, key: str, keys: Sequence[str | None], index: SampleIndex, ids: Ids) -> npt.NDArray[np.int64]:
    """Return the row of each of `ids`; raise DataError for a key that is missing, unknown or there twice."""
    known = index.keys()
    row_of: dict[str | None, int] = {}
    twice = []
    for row, each in enumerate(keys):
        if each in row_of:
            twice.append(str(each))
        row_of[each] = row
    names = set(known)
    unknown = [str(each) for each in row_of if each not in names]
    missing = [known[sample_id] for sample_id in ids if known[sample_id] not in row_of]
    problems = {"lacks": missing, "repeats": twice, "has unknown": unknown}
    parts = [f"{verb} {len(found):,} keys ({list_some(found)})" for verb, found in problems.items() if found]
    if parts:
        order = index.folder / "index.parquet"
        raise DataError(
            f"{path} {', '.join(parts)}", field=key, fix=f"write one row for each image; {order} has the keys"
        )
    return np.array([row_of[known[sample_id]] for sample_id in ids], np.int64)
