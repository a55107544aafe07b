"""The tables of the report: pure functions from report.json to columns and rows of text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.report.class_names import short_names
from trainer.report.profile import shares, shown_phases
from trainer.report.summary import claimed_noise, method_title, points, share, shows_removed
from trainer.report.text import choose_form, format_duration, shorten

LISTED = 50  # maximum rows of tables that could be very long
SHOWN = 25  # rows of a long table before it is opened
NAME = 34  # maximum characters of a class name


@dataclass(frozen=True)
class Column:
    """A column: its label, an explanation, and whether it holds words instead of numbers."""

    label: str
    about: str = ""
    words: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: its text, what it is sorted by if not by its text, the whole text, and a second line."""

    text: str
    value: float | None = None
    whole: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page. search: what the box for searching asks for; empty: no box. shown: rows before opening."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False
    search: str = ""
    shown: int = 0
    strong: frozenset[int] = field(default_factory=frozenset)
    """Rows to emphasise."""
    compact: bool = False
    """Whether it is narrow enough to stay a table on a phone."""


class ClassNames:
    """The cells of classes: short names, with the whole names behind them."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._whole = report["class_names"]
        self._short = short_names(self._whole)

    def cell(self, number: int | None, note: str = "") -> Cell:
        if number is None:
            return Cell("–")
        return Cell(shorten(self._short[number], NAME), None, self._whole[number], note)


def count(number: int | None) -> Cell:
    return Cell("–" if number is None else f"{number:,}", number)


def percentage(value: float | None) -> Cell:
    return Cell(share(value), value)


def label_table(report: dict[str, Any]) -> Table | None:
    """Return the noise of every class, by given label; None without a selection."""
    rows = (report["selection"] or {}).get("by_label")
    if not rows:
        return None
    names, measured = ClassNames(report), report["selection"]["by_class"]
    columns = [
        Column("class", "the given label", words=True),
        *_group_columns(report),
        *(
            [Column("precision", "LP of this true class"), Column("recall", "LR of this true class")]
            if measured
            else []
        ),
        Column("usual suggestion", "the class that held-out predictions suggest most often for flagged labels", True),
    ]
    cells = []
    for number, row in enumerate(rows):
        line = [names.cell(number), *_group_cells(report, row)]
        if measured:
            line += [percentage(measured[number][key]) for key in ("label_precision", "label_recall")]
        usual = f"{row['suggested_count']:,} of {row['flagged']:,}" if row["suggested"] is not None else ""
        cells.append([*line, names.cell(row["suggested"], usual)])
    return Table(columns, cells, "By class", sortable=True, search="Find a class", shown=SHOWN)


def source_table(report: dict[str, Any]) -> Table | None:
    """Return the noise of every source; None if there is only one."""
    if not report["by_source"]:
        return None
    columns = [Column("source", "the top folder of the keys", words=True), *_group_columns(report)]
    cells = [
        [Cell(shorten(row["name"], NAME), whole=row["name"]), *_group_cells(report, row)]
        for row in report["by_source"]
    ]
    return Table(columns, cells, "By source", sortable=True)


def _group_columns(report: dict[str, Any]) -> list[Column]:
    return [
        Column("labels"),
        Column("kept", "labels that INCV selected"),
        Column("flagged", "not selected, and contradicted by a network that did not train on the image"),
        *([Column("estimated wrong", "confident estimate")] if _states_noise(report) else []),
        *([Column("truly wrong")] if report["noise"]["true"] is not None else []),
    ]


def _group_cells(report: dict[str, Any], row: dict[str, Any]) -> list[Cell]:
    total = row["samples"]
    cells = [count(total)]
    for key in ("selected", "flagged"):
        part = row[key] / total if total else None
        cells.append(Cell(share(part), part, note=f"{row[key]:,}"))
    if _states_noise(report):
        cells.append(percentage(row["estimated_wrong"]))
    if report["noise"]["true"] is not None:
        cells.append(percentage(row["wrong"]))
    return cells


def _states_noise(report: dict[str, Any]) -> bool:
    return report["noise"]["true"] is not None or claimed_noise(report) is not None


def rounds_table(report: dict[str, Any]) -> Table:
    removed, truth = shows_removed(report), bool(report["truth_known"])
    columns = [Column("after round"), Column("selected"), Column("candidates")]
    columns += [Column("removed")] if removed else []
    columns += [Column("agreement in the round")]
    if truth:
        columns += [Column("precision (theory)"), Column("recall (theory)"), Column("wrong among removed")]
    rows = []
    for entry in report["rounds"]:
        row = [count(entry["round"]), count(entry["selected"]), count(entry["candidates"])]
        row += [count(entry["removed"])] if removed else []
        row += [percentage(entry["agreement"])]
        if truth:
            theory = entry["theory"] or {}
            row += [
                Cell(share(entry[key]), note=f"({share(theory.get(key))})" if theory else "")
                for key in ("label_precision", "label_recall")
            ]
            row += [percentage(entry["removed_noise"])]
        rows.append(row)
    return Table(columns, rows)


def accuracy_table(report: dict[str, Any], where: str) -> Table:
    columns = [Column(where, words=True), Column("top-1"), Column("top-5"), Column("top-1 of each network")]
    columns += [Column("top-1 of the ensemble"), Column("images")]
    rows, strong = [], set()
    for place, (method, result) in enumerate(report["accuracy"][where].items()):
        if (report["methods"].get(method) or {}).get("headline"):
            strong.add(place)
        top5 = result["top5"] if report["classes"] > 5 else None
        each = ", ".join(points(value) for value in result["top1_each"])
        texts = (points(result["top1"]), points(top5), each, points(result["top1_ensemble"]))
        rows.append([Cell(method_title(report, method)), *map(Cell, texts), count(result["count"])])
    return Table(columns, rows, strong=frozenset(strong))


def sampling_error(report: dict[str, Any], where: str) -> str:
    """Say how far an accuracy may be off because the evaluation set is a sample; empty without images."""
    counted = max((result["count"] for result in report["accuracy"][where].values()), default=0)
    if not counted:
        return ""
    error = 196 * math.sqrt(0.25 / counted)  # 95 %, where it is largest: at an accuracy of 50 %
    return (
        f"With {counted:,} images, the sampling error of an accuracy is at most ±{error:.1f} points (95 % interval); "
        "near 0 or 100 % it is smaller."
    )


def pair_tables(report: dict[str, Any]) -> list[Table]:
    """Return the most confused classes: estimated, and by the true labels if they are known."""
    confusion = report["confusion"]
    pairs = confusion["pairs"]
    kinds = [
        ("Worst confusions of the labels, estimated", "true class", "labelled", confusion["estimated_pairs"]),
        ("Most frequent wrong labels, by the true labels", "true class", "labelled", pairs["given"]),
        ("Most confused classes in held-out predictions", "true class", "predicted", pairs["predicted"]),
    ]
    if pairs["predicted"] is None:
        title = "Labels contradicted most often by held-out predictions"
        kinds.append((title, "given label", "predicted", pairs["held_out"]))
    names = ClassNames(report)
    tables = []
    for title, origin, target, found in kinds:
        if found is None or (found is confusion["estimated_pairs"] and not _states_noise(report)):
            continue
        columns = [Column(origin, words=True), Column(target, words=True), Column("samples"), Column("of the class")]
        rows = [
            [names.cell(each["from"]), names.cell(each["to"]), count(each["count"]), percentage(each["share"])]
            for each in found[:10]
        ]
        tables.append(Table(columns, rows, title, compact=True))
    return tables


def left_out_table(report: dict[str, Any]) -> Table:
    columns = [Column(name, words=True) for name in ("set", "path", "outcome", "reason")]
    rows = [[Cell(file[column.label]) for column in columns] for file in report["left_out"]["files"][:LISTED]]
    return Table(columns, rows)


def unreadable_table(report: dict[str, Any]) -> Table:
    columns = [Column("set", words=True), Column("id"), Column("key", words=True), Column("failed in", words=True)]
    rows = []
    for sample in report["unreadable"]["samples"][:LISTED]:
        met = "; ".join(sample["met"][:6])
        met += f"; and {len(sample['met']) - 6} more" if len(sample["met"]) > 6 else ""
        rows.append([Cell(sample["split"]), Cell(str(sample["sample_id"])), Cell(sample["key"]), Cell(met)])
    return Table(columns, rows)


def profile_table(report: dict[str, Any]) -> Table:
    phases = shown_phases(report["profile"] or [])
    columns = [
        Column("training", words=True),
        Column("steps"),
        Column("time"),
        *(Column(words) for _, words, _ in phases),
    ]
    rows = []
    for training in report["profile"] or []:
        part = shares(training)
        row = [Cell(training["training"]), count(training["steps"]), Cell(format_duration(training["wall_s"]))]
        rows.append([*row, *(percentage(part[phase]) for phase, _, _ in phases)])
    return Table(columns, rows)


def starts_table(report: dict[str, Any]) -> Table:
    """Return each start of the run: when, from where, how it ended, and on what; without its command."""
    labels = ("started", "resumed from", "ended", "steps", "processes", "threads", "hardware")
    columns = [Column(label, words=True) for label in labels]
    return Table(columns, [[Cell(row[label]) for label in labels] for row in start_rows(report)])


def _guess_end(report: dict[str, Any], is_last: bool) -> str:
    """Return what became of a start that did not record its end."""
    if not is_last:
        return "killed"
    return "wrote this report" if "report" in report["time_s"] else "still running, or killed"


def count_starts(report: dict[str, Any]) -> str:
    starts = report["starts"]
    words = f"{starts['count']} {choose_form(starts['count'], 'start', 'starts')}"
    if starts["count"] < 2:
        return f"{words}."
    return f"{words}; {starts['resumed'] or 'none'} of them resumed from a checkpoint."


def start_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """Describe each start of the run; rounds and folds count from 1, as throughout the report."""
    rows = []
    starts = report["starts"]["list"]
    for number, start in enumerate(starts):
        place = start.get("resumed_from") or {}
        words = [str(place["stage"])] if place.get("stage") is not None else []
        words += [f"{key} {place[key] + 1}" for key in ("round", "fold") if place.get(key) is not None]
        words += [f"step {place['step']:,}"] if place.get("step") is not None else []
        processes = f"{start.get('world', 1)} on {str(start.get('device') or 'cpu').partition(':')[0]}"
        if start.get("launcher", "alone") != "alone":
            processes += f", {start['launcher']}"
        ended = start.get("ended") or _guess_end(report, is_last=number + 1 == len(starts))
        steps = sum((start.get("steps_executed") or {}).values())
        rows.append(
            {
                "started": str(start.get("time") or "–").replace("T", " ").replace("+00:00", " UTC"),
                "resumed from": ", ".join(words) or "–",
                "ended": str(ended),
                "steps": f"{steps:,}" if steps else "–",
                "processes": processes,
                "threads": str(start.get("threads") or "–"),
                "hardware": str(start.get("hardware") or "–"),
                "command": str(start.get("command") or "–"),
            }
        )
    return rows
