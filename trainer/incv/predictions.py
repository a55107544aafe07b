"""A fold's predictions on its held-out part: one row per held-out id."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids
from trainer.passes import Status
from trainer.passes.table import SampleTable, gather_table

_OF_PASS = {
    "predicted": "predicted",
    "agrees": "agreement",
    "loss": "losses",
    "given_probability": "given_probability",
    "predicted_probability": "predicted_probability",
    "second": "second",
    "second_probability": "second_probability",
    "given_rank": "given_rank",
    "status": "status",
}
"""The column of the pass that each column of the file comes from."""
OUTPUTS = tuple(output for output in _OF_PASS.values() if output != "status")
"""What a pass must compute for `Predictions.of_table`."""
_FIX = "their files belong to another run, or were changed. Restart the stage with `--redo incv`"


@dataclass(frozen=True)
class Predictions:
    """A table of predictions: columns of equal length, sorted by sample_id."""

    sample_id: Ids
    fold: npt.NDArray[np.int8]
    predicted: npt.NDArray[np.int32]
    """Top-1 class; -1 if the row is not usable."""
    agrees: npt.NDArray[np.bool_]
    """Whether the given label is among the top-k classes."""
    loss: npt.NDArray[np.float32]
    given_probability: npt.NDArray[np.float32]
    predicted_probability: npt.NDArray[np.float32]
    second: npt.NDArray[np.int32]
    """The second likeliest class; -1 if the row is not usable."""
    second_probability: npt.NDArray[np.float32]
    given_rank: npt.NDArray[np.int32]
    """Number of classes that are likelier than the given label; -1 if the row is not usable."""
    status: npt.NDArray[np.int8]

    def usable(self) -> npt.NDArray[np.bool_]:
        return self.status == Status.OK

    def agreement(self) -> float:
        """Return the share of usable rows whose prediction agrees (the paper's "test accuracy" on noisy labels)."""
        usable = self.usable()
        return float(self.agrees[usable].mean()) if usable.any() else 0.0

    def of_fold(self, fold: int) -> "Predictions":
        return self.rows(self.fold == fold)

    def rows(self, mask: npt.NDArray[np.bool_]) -> "Predictions":
        return Predictions(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})

    def with_folds(self, folds: npt.NDArray[np.int8]) -> "Predictions":
        """Return the predictions with the fold of each row."""
        return replace(self, fold=folds)

    def write(self, path: Path) -> None:
        write_parquet(path, pa.table({name: getattr(self, name) for name in self.__dataclass_fields__}))

    @classmethod
    def read(cls, path: Path) -> "Predictions":
        table = read_parquet(path, "table of predictions")
        if lacking := sorted(cls.__dataclass_fields__.keys() - set(table.column_names)):
            raise DataError(f"{path} lacks the columns {', '.join(lacking)}: restart the stage with `--redo incv`")
        return cls(**{name: table[name].to_numpy() for name in cls.__dataclass_fields__})

    @classmethod
    def of_table(cls, table: SampleTable, fold: int) -> "Predictions":
        """Return what a fold's network gave for its held-out part."""
        columns = {name: table[output].cpu().contiguous().numpy() for name, output in _OF_PASS.items()}
        return cls(sample_id=table.ids.cpu().numpy(), fold=np.full(len(table), fold, np.int8), **columns)


def merge_predictions(parts: Iterable[Predictions], expected: Ids) -> Predictions:
    """Merge the rows of all folds, sorted by sample_id; raise DataError unless they cover `expected` exactly once."""
    parts = list(parts)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in Predictions.__dataclass_fields__
    }
    order = np.argsort(columns["sample_id"], kind="stable")
    whole = Predictions(**{name: column[order] for name, column in columns.items()})
    if not np.array_equal(whole.sample_id, np.sort(expected)):
        raise DataError(f"the predictions of a round do not cover its candidates exactly once: {_FIX}")
    return whole


def gather_predictions(world: World, parts: Iterable[Predictions], expected: Ids) -> Predictions:
    """Merge the rows of all ranks' folds on every rank, as `merge_predictions` does; a collective."""
    columns: dict[str, torch.Tensor] = {}
    if parts := list(parts):  # only one rank of a fold's group has any
        for name in Predictions.__dataclass_fields__:
            columns[name] = torch.cat([torch.from_numpy(getattr(part, name)) for part in parts])
    ids = columns.pop("sample_id", torch.empty(0, dtype=torch.int64))
    whole = gather_table(world, ids, columns, expected, "the predictions of a round", _FIX)
    rows = {name: column.contiguous().numpy() for name, column in whole.columns.items()}
    return Predictions(sample_id=whole.ids.numpy(), **rows)
