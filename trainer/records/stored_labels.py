"""The labels of a run on disk: labels.parquet, and true_labels.parquet in the same form."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shards.durable import read_parquet, write_parquet
from trainer.loading.sample_order import Ids

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StoredLabels:
    """A table of labels; the arrays have one row per sample of the run."""

    ids: Ids
    labels: Labels
    checked: npt.NDArray[np.bool_]
    """Whether the label was checked by hand (`labels.corrections`)."""

    def by_id(self, samples: int) -> Labels:
        """Return the labels indexed by sample_id, [samples]; -1 outside the run."""
        dense = np.full(samples, -1, np.int64)
        dense[self.ids] = self.labels
        return dense

    def checked_by_id(self, samples: int) -> npt.NDArray[np.bool_]:
        """Return which labels were checked by hand, indexed by sample_id, [samples]."""
        dense = np.zeros(samples, bool)
        dense[self.ids] = self.checked
        return dense


def write_labels(path: Path, ids: Ids, labels: Labels, checked: Ids | None = None) -> None:
    """Write the labels of a run. checked: the samples whose label was checked by hand, if there are any."""
    columns = {"sample_id": ids, "label": labels.astype(np.int32)}
    if checked is not None and len(checked):
        columns["checked"] = np.isin(ids, checked)
    write_parquet(path, pa.table(columns))


def read_labels(path: Path) -> StoredLabels:
    table = read_parquet(path, "table of labels")
    ids, labels = (table[name].to_numpy().astype(np.int64) for name in ("sample_id", "label"))
    has_checked = "checked" in table.column_names
    return StoredLabels(ids, labels, table["checked"].to_numpy() if has_checked else np.zeros(len(ids), bool))
