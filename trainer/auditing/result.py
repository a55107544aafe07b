"""What an audit returns in Python: the list, the verdict and the files."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.durable import read_json, read_parquet
from trainer.records.run_directory import RunDirectory


@dataclass(frozen=True, eq=False)
class AuditResult:
    """The result of an audit."""

    samples: pa.Table
    """All samples, most suspicious first: the columns of labels_review.parquet (docs/files.md)."""
    verdict: str
    """`trusted`, `with care` or `do not use`."""
    noise: float | None
    """Estimated share of wrong labels; None if the verdict does not allow to state one."""
    run: Path
    """The run directory, with `report.html`."""
    probabilities: pa.Table | None = None
    """Held-out probabilities, calibrated: a column `key`, and one for each class; None if the run has none."""

    @classmethod
    def read(cls, root: Path) -> "AuditResult":
        directory = RunDirectory(root)
        table = read_parquet(directory.labels_review_parquet, "list of labels to review")
        report: dict[str, Any] = read_json(directory.report_json)
        trust = report.get("trust") or {"level": "do not use", "claims_noise": False}
        stated = report["noise"].get("stated") if trust["claims_noise"] else None
        kept = directory.probabilities_table
        probabilities = read_parquet(kept, "table of probabilities") if kept.exists() else None
        return cls(table, trust["level"], report["noise"][stated] if stated else None, root, probabilities)

    @property
    def issues(self) -> pa.Table:
        """The flagged samples, most suspicious first."""
        return self.samples.filter(pc.field("is_label_issue"))

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        share = "" if self.noise is None else f", {self.noise:.1%} of the labels estimated wrong"
        flagged = f"{len(self.issues):,} of {len(self):,} labels flagged"
        return f"{flagged}{share}; {self.verdict}; {self.run / 'report.html'}"

    def _repr_html_(self) -> str:
        names = ("key", "given_label", "predicted_label")
        rows = zip(*(self.issues[name].slice(0, 10).to_pylist() for name in names), strict=True)
        body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
        head = "".join(f"<th>{name}</th>" for name in names)
        return f"<p>{escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>"
