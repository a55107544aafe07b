"""Tables of INCV's selection by class; if there are many classes, only those with the lowest and highest values."""

from dataclasses import dataclass
from typing import Any

ALL_SHOWN = 50  # with more classes, only the lowest and highest are shown
ENDS = 20


@dataclass(frozen=True)
class ClassTable:
    """A table with one row (class, numbers) per class."""

    caption: str
    rows: list[tuple[int, dict[str, Any]]]


def class_tables(report: dict[str, Any]) -> list[ClassTable]:
    """Return one table of all classes, or two: lowest and highest. By true class if known, else by given label."""
    selection = report["selection"] or {}
    truth = selection.get("by_class") is not None
    rows = list(enumerate(selection.get("by_class" if truth else "by_label") or []))
    by = "true class" if truth else "given label"
    if len(rows) <= ALL_SHOWN:
        return [ClassTable(f"By {by}", rows)] if rows else []
    ranked = sorted((row for row in rows if row[1]["samples"]), key=lambda row: (_kept(row[1], truth), row[0]))
    what = "recall" if truth else "share selected"
    return [
        ClassTable(f"By {by}: the {ENDS} with the lowest {what}", ranked[:ENDS]),
        ClassTable(f"By {by}: the {ENDS} with the highest {what}", ranked[-ENDS:][::-1]),
    ]


def _kept(row: dict[str, Any], truth: bool) -> float:
    if truth:
        return -1.0 if row["label_recall"] is None else float(row["label_recall"])
    return float(row["selected"] / row["samples"])
