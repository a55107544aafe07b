"""What a fold's network says of the half it never saw: one row for each held-out id."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError
from trainer.loading.batch import Batch
from trainer.loading.sample_order import Ids


class Status(IntEnum):
    OK = 0
    UNREADABLE = 1
    NON_FINITE = 2


@dataclass(frozen=True)
class Predictions:
    """Columns of equal length, sorted by sample_id."""

    sample_id: Ids
    fold: npt.NDArray[np.int8]
    predicted: npt.NDArray[np.int32]
    """Likeliest class; -1 where there is none."""
    agrees: npt.NDArray[np.bool_]
    """Whether the given label is among the k likeliest classes."""
    loss: npt.NDArray[np.float32]
    given_probability: npt.NDArray[np.float32]
    predicted_probability: npt.NDArray[np.float32]
    status: npt.NDArray[np.int8]

    def usable(self) -> npt.NDArray[np.bool_]:
        return self.status == Status.OK

    def agreement(self) -> float:
        """Share of usable held-out samples whose label the network predicts: the paper's test accuracy."""
        usable = self.usable()
        return float(self.agrees[usable].mean()) if usable.any() else 0.0

    def of_fold(self, fold: int) -> "Predictions":
        return self.rows(self.fold == fold)

    def rows(self, mask: npt.NDArray[np.bool_]) -> "Predictions":
        return Predictions(**{name: getattr(self, name)[mask] for name in self.__dataclass_fields__})

    def write(self, path: Path) -> None:
        write_parquet(path, pa.table({name: getattr(self, name) for name in self.__dataclass_fields__}))

    @classmethod
    def read(cls, path: Path) -> "Predictions":
        table = read_parquet(path, "table of predictions")
        return cls(**{name: table[name].to_numpy() for name in cls.__dataclass_fields__})


NOTHING = Predictions(
    sample_id=np.empty(0, np.int64),
    fold=np.empty(0, np.int8),
    predicted=np.empty(0, np.int32),
    agrees=np.empty(0, np.bool_),
    loss=np.empty(0, np.float32),
    given_probability=np.empty(0, np.float32),
    predicted_probability=np.empty(0, np.float32),
    status=np.empty(0, np.int8),
)
"""Of a rank that had nothing to predict."""


def merged(parts: Iterable[Predictions], expected: Ids) -> Predictions:
    """All folds' rows, sorted; raises where they are not the expected ids, each exactly once."""
    parts = list(parts)
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in Predictions.__dataclass_fields__
    }
    order = np.argsort(columns["sample_id"], kind="stable")
    whole = Predictions(**{name: column[order] for name, column in columns.items()})
    if not np.array_equal(whole.sample_id, np.sort(expected)):
        raise DataError(
            "a round's predictions do not cover its candidates exactly once: its files are not of this run, or were "
            "changed. Begin the stage again with `--redo incv`"
        )
    return whole


def collect(passes: Iterable[tuple[Batch, list[torch.Tensor]]], fold: int, top_k: int) -> Predictions:
    """Turn a forward pass of one network into rows; unreadable and non-finite ones are marked, not dropped."""
    columns: dict[str, list[npt.NDArray[np.generic]]] = {name: [] for name in Predictions.__dataclass_fields__}
    for batch, (logits,) in passes:
        for name, values in _judged(batch, logits, fold, top_k).items():
            columns[name].append(values)
    if not columns["sample_id"]:
        return NOTHING
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    order = np.argsort(joined["sample_id"], kind="stable")
    return Predictions(**{name: values[order] for name, values in joined.items()})


def _judged(batch: Batch, logits: torch.Tensor, fold: int, top_k: int) -> dict[str, npt.NDArray[np.generic]]:
    real = batch.ids >= 0
    ids, labels = batch.ids[real], batch.labels[real]
    log_p = torch.log_softmax(logits[real], dim=1)
    given = log_p.gather(1, labels[:, None])[:, 0]
    highest, likeliest = log_p.topk(min(top_k, log_p.shape[1]), dim=1)
    status = torch.where(torch.isfinite(log_p).all(dim=1), Status.OK, Status.NON_FINITE)
    status[batch.weights[real] == 0] = Status.UNREADABLE
    usable = status == Status.OK
    nothing = torch.tensor(torch.nan, device=given.device)

    def column(values: torch.Tensor, missing: torch.Tensor | float | bool, kind: type) -> npt.NDArray[np.generic]:
        return torch.where(usable, values, missing).cpu().numpy().astype(kind)

    return {
        "sample_id": ids.cpu().numpy(),
        "fold": np.full(len(ids), fold, np.int8),
        "predicted": column(likeliest[:, 0], -1, np.int32),
        "agrees": column((likeliest == labels[:, None]).any(dim=1), False, np.bool_),
        "loss": column(-given, nothing, np.float32),
        "given_probability": column(given.exp(), nothing, np.float32),
        "predicted_probability": column(highest[:, 0].exp(), nothing, np.float32),
        "status": status.cpu().numpy().astype(np.int8),
    }
