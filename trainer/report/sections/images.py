"""The section on images that were not used: left out in packing (rejected.csv), or unreadable in the run."""

import csv
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shards.csv_file import unescape_cell, write_csv
from shards.sample_index import SampleIndex
from trainer.records.run_directory import RunDirectory
from trainer.records.unreadable import parse_complete_lines
from trainer.report.run import ReportRun
from trainer.report.section import LISTED, Cell, Column, Report, Section, Table
from trainer.report.text import choose_form

OUTCOMES = {
    "rejected": ("image rejected", "images rejected"),
    "ignored": ("file ignored", "files ignored"),
    "misnamed": ("image misnamed but used", "images misnamed but used"),
}
"""In words, for one file and for several."""
MOST = 1000  # maximum of each list in report.json; rejected.csv and the logs list all

_log = logging.getLogger(__name__)


def collect(run: ReportRun) -> dict[str, Any]:
    return {"left_out": read_left_out(run.directory), "unreadable": find_unreadable(run.directory)}


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


def find_unreadable(run: RunDirectory) -> dict[str, Any]:
    """Return {"count", "samples": [{"split", "sample_id", "key", "met": [...]}]} from the logs of all ranks.

    met: where the image could not be read.
    """
    samples: dict[tuple[str, int], dict[str, Any]] = {}
    for path in run.unreadable_logs():
        for line in parse_complete_lines(path.read_bytes()):
            identity = (line["split"], line["sample_id"])
            sample = samples.setdefault(identity, {key: line[key] for key in ("split", "sample_id", "key")})
            places = sample.setdefault("met", [])
            if (words := _describe_place(line)) not in places:
                places.append(words)
    return {"count": len(samples), "samples": list(samples.values())[:MOST]}


def _describe_place(line: dict[str, Any]) -> str:
    """Describe where an image could not be read; rounds and folds count from 1, as throughout the report."""
    where = [line["stage"]]
    where += [f"{name} {line[name] + 1}" for name in ("round", "fold") if line[name] is not None]
    return f"{', '.join(where)}: {line['doing']}"


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    left_out = report["left_out"]
    return {
        "counts": describe_counts(left_out["counts"]),
        "listed": sum(left_out["counts"].values()),
        "left_out": _left_out_table(left_out["files"][:LISTED]),
        "unreadable": _unreadable_table(report["unreadable"]["samples"][:LISTED]),
    }


def _left_out_table(files: list[dict[str, str]]) -> Table:
    columns = [Column(name, words=True) for name in ("set", "path", "outcome", "reason")]
    return Table(columns, [[Cell(file[column.label]) for column in columns] for file in files])


def _unreadable_table(samples: list[dict[str, Any]]) -> Table:
    columns = [Column("set", words=True), Column("id"), Column("key", words=True), Column("failed in", words=True)]
    rows = []
    for sample in samples:
        met = "; ".join(sample["met"][:6])
        met += f"; and {len(sample['met']) - 6} more" if len(sample["met"]) > 6 else ""
        rows.append([Cell(sample["split"]), Cell(str(sample["sample_id"])), Cell(sample["key"]), Cell(met)])
    return Table(columns, rows)


_TEMPLATE = Path(__file__).with_suffix(".html")
SECTION = Section("images", "Images that were not used", collect, render, _TEMPLATE, link="Images not used")
