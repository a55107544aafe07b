"""A fold's predictions on its held-out part: one row per held-out id."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError
from trainer.incv.prediction_status import Status
from trainer.loading.batch import Batch
from trainer.loading.sample_order import Ids


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

    def write(self, path: Path) -> None:
        write_parquet(path, pa.table({name: getattr(self, name) for name in self.__dataclass_fields__}))

    @classmethod
    def read(cls, path: Path) -> "Predictions":
        table = read_parquet(path, "table of predictions")
        columns = {name: table[name].to_numpy() for name in cls.__dataclass_fields__ if name in table.column_names}
        return cls(**_unknown(table.num_rows) | columns)


def _unknown(count: int) -> dict[str, npt.NDArray[np.generic]]:
    """The columns that files of version 0.1 do not have."""
    return {
        "second": np.full(count, -1, np.int32),
        "second_probability": np.full(count, np.nan, np.float32),
        "given_rank": np.full(count, -1, np.int32),
    }


EMPTY_PREDICTIONS = Predictions(
    sample_id=np.empty(0, np.int64),
    fold=np.empty(0, np.int8),
    predicted=np.empty(0, np.int32),
    agrees=np.empty(0, np.bool_),
    loss=np.empty(0, np.float32),
    given_probability=np.empty(0, np.float32),
    predicted_probability=np.empty(0, np.float32),
    second=np.empty(0, np.int32),
    second_probability=np.empty(0, np.float32),
    given_rank=np.empty(0, np.int32),
    status=np.empty(0, np.int8),
)
"""The predictions of a rank that has no rows to predict."""


def join_predictions(parts: Iterable[Predictions]) -> Predictions:
    """Return the rows of all parts, sorted by sample_id."""
    parts = [EMPTY_PREDICTIONS, *parts]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in Predictions.__dataclass_fields__
    }
    order = np.argsort(columns["sample_id"], kind="stable")
    return Predictions(**{name: column[order] for name, column in columns.items()})


def merge_predictions(parts: Iterable[Predictions], expected: Ids) -> Predictions:
    """Merge the rows of all folds, sorted by sample_id; raise DataError unless they cover `expected` exactly once."""
    whole = join_predictions(parts)
    if not np.array_equal(whole.sample_id, np.sort(expected)):
        raise DataError(
            "the predictions of a round do not cover its candidates exactly once: their files belong to another run, "
            "or were changed. Restart the stage with `--redo incv`"
        )
    return whole


def collect_predictions(
    passes: Iterable[tuple[Batch, list[torch.Tensor]]], labels: torch.Tensor, fold: int, top_k: int
) -> Predictions:
    """Convert a predict pass of one network into rows; unreadable and non-finite rows are marked, not dropped.

    labels: the given ones, int64 [samples], indexed by sample_id, on the device of the batches.

    Rows stay on the device until the pass ends, so there is no host-device sync between batches.
    """
    parts = [
        _measure_rows(batch, labels[batch.ids.clamp(min=0)].clamp(min=0), logits, top_k)
        for batch, (logits,) in passes
    ]
    if not parts:
        return EMPTY_PREDICTIONS
    columns = {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}
    real = columns["sample_id"] >= 0
    order = np.flatnonzero(real)[np.argsort(columns["sample_id"][real], kind="stable")]
    rows = {name: values[order] for name, values in columns.items()}
    return Predictions(fold=np.full(len(order), fold, np.int8), **rows)


def _measure_rows(batch: Batch, labels: torch.Tensor, logits: torch.Tensor, top_k: int) -> dict[str, torch.Tensor]:
    """Compute the prediction columns of one batch, including its fill rows, on the batch's device."""
    log_p = torch.log_softmax(logits, dim=1)
    given = log_p.gather(1, labels[:, None])[:, 0]
    highest, likeliest = log_p.topk(min(max(top_k, 2), log_p.shape[1]), dim=1)
    runner_up = min(1, likeliest.shape[1] - 1)
    agrees = (likeliest[:, :top_k] == labels[:, None]).any(dim=1)
    finite = torch.isfinite(log_p).all(dim=1)
    status = torch.where(finite, int(Status.OK), int(Status.NON_FINITE))
    status = torch.where(batch.weights > 0, status, int(Status.UNREADABLE))
    usable = status == Status.OK
    return {
        "sample_id": batch.ids,
        "predicted": torch.where(usable, likeliest[:, 0], -1).int(),
        "agrees": agrees & usable,
        "loss": torch.where(usable, -given, torch.nan).float(),
        "given_probability": torch.where(usable, given.exp(), torch.nan).float(),
        "predicted_probability": torch.where(usable, highest[:, 0].exp(), torch.nan).float(),
        "second": torch.where(usable, likeliest[:, runner_up], -1).int(),
        "second_probability": torch.where(usable, highest[:, runner_up].exp(), torch.nan).float(),
        "given_rank": torch.where(usable, (log_p > given[:, None]).sum(dim=1), -1).int(),
        "status": status.to(torch.int8),
    }
