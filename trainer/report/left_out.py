"""The list of files that a run does not use, or uses although their name is wrong: rejected.csv."""

import csv
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.csv_file import unescape_cell, write_csv
from shards.sample_index import SampleIndex
from trainer.records.run_directory import RunDirectory
from trainer.report.text import choose_form

OUTCOMES = {
    "rejected": ("image rejected", "images rejected"),
    "ignored": ("file ignored", "files ignored"),
    "misnamed": ("image misnamed but used", "images misnamed but used"),
}
"""In words, for one file and for several."""
MOST = 1000  # maximum listed in report.json; rejected.csv lists all

_log = logging.getLogger(__name__)


def write_left_out(run: RunDirectory, sets: Mapping[str, SampleIndex]) -> None:
    """Write rejected.csv, if there is anything to list, and log how much. sets: the packed splits by name."""
    tables = {name: list_left_out(name, index) for name, index in sets.items()}
    table = pa.concat_tables(tables.values())
    if not len(table):
        run.rejected_csv.unlink(missing_ok=True)
        return
    write_csv(run.rejected_csv, table)
    for name, part in tables.items():
        if len(part):
            counts = describe_counts(Counter(part["outcome"].to_pylist()))
            _log.info("%s: %s (listed in %s)", name, counts, run.rejected_csv)


def list_left_out(name: str, index: SampleIndex) -> pa.Table:
    """Return the columns set, path, outcome and reason; path: the key of a sample, or the path of an ignored file."""
    rows = index.read_rejected()
    outcome = pc.if_else(pc.is_null(rows["sample_id"]), "ignored", "rejected")
    outcome = pc.if_else(pc.fill_null(pc.equal(rows["verdict"], "ok"), False), "misnamed", outcome)
    names = pa.array([name] * len(rows), pa.string())
    return pa.table({"set": names, "path": rows["key"], "outcome": outcome, "reason": rows["reason"]})


def describe_counts(counts: Mapping[str, int]) -> str:
    """Say how many files have each outcome: `3 images rejected, 12 files ignored`."""
    found = {outcome: counts[outcome] for outcome in OUTCOMES if counts.get(outcome)}
    return ", ".join(f"{number:,} {choose_form(number, *OUTCOMES[outcome])}" for outcome, number in found.items())


def read_left_out(run: RunDirectory) -> dict[str, Any]:
    """Return {"counts": {outcome: number}, "files": [...]} from rejected.csv for the report."""
    counts: Counter[str] = Counter()
    files: list[dict[str, str]] = []
    if run.rejected_csv.exists():
        with run.rejected_csv.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                counts[row["outcome"]] += 1
                if len(files) < MOST:
                    files.append({key: unescape_cell(value) for key, value in row.items()})
    return {"counts": dict(counts), "files": files}
