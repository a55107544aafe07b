"""The noise section: estimates of the share of wrong labels, in all, of each class and of each source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from trainer.incv.selection_index import SelectionIndex, State
from trainer.report.plots import Bar, bar_chart, for_widths, percent
from trainer.report.run import ReportRun
from trainer.report.section import NAME, Cell, ClassNames, Column, Report, Section, Table, count, percentage
from trainer.report.signals import confirmed_noise, read_repeated, stated_estimate
from trainer.report.summary import claimed_noise, states_noise
from trainer.report.text import share, shorten

SHOWN = 25  # rows of a long table before it is opened


def collect(run: ReportRun) -> dict[str, Any]:
    noise = (run.incv or {}).get("noise") or {}
    estimates = {name: noise.get(name) for name in ("paper", "confident", "confidence_curve", "combined")}
    estimates["confirmed"] = confirmed_noise(run, run.samples, run.selection, read_repeated(run, run.samples))
    estimates["true"] = run.samples.realised_noise()
    stated = stated_estimate(estimates, (run.config.get("incv") or {}).get("noise_estimate"))
    return {
        "noise": estimates | {"stated": stated[0] if stated else None},
        "by_source": None if run.selection is None else _describe_sources(run, run.selection),
    }


def describe_labels(run: ReportRun, selection: SelectionIndex) -> list[dict[str, Any]]:
    """Return for each given label: counts, the estimated and true share of wrong labels, and the usual suggestion."""
    samples, joint = run.samples, run.joint
    rows = _describe(samples.given, samples.classes, run, selection)
    for label, row in enumerate(rows):
        usual = int(run.flagged_pairs[label].argmax())
        number = int(run.flagged_pairs[label, usual])
        row |= {"suggested": usual if number else None, "suggested_count": number}
        held = 0.0 if joint is None else float(joint[label].sum())
        row["estimated_wrong"] = None if joint is None or not held else 1 - float(joint[label, label]) / held
    return rows


def _describe_sources(run: ReportRun, selection: SelectionIndex) -> list[dict[str, Any]] | None:
    """Return for each source: name, counts, and the estimated and true share of wrong labels; None without any."""
    sources, samples, held_out = run.sources, run.samples, run.held_out
    if sources is None:
        return None
    numbers = np.full(len(samples.given), -1, np.int64)
    shared = min(len(numbers), len(sources.numbers))
    numbers[:shared] = sources.numbers[:shared]
    rows = _describe(numbers, len(sources.names), run, selection)
    for number, row in enumerate(rows):
        row |= {"name": sources.names[number], "estimated_wrong": None}
        if held_out is not None and (among := numbers[held_out.ids] == number).any():
            row["estimated_wrong"] = 1 - float(np.trace(held_out.joint(among, samples.classes)))
    return rows


def _describe(
    groups: NDArray[np.integer], size: int, run: ReportRun, selection: SelectionIndex
) -> list[dict[str, Any]]:
    """Count samples, selected, flagged and truly wrong labels of each group. groups: by sample_id, -1: in none."""
    samples, state = run.samples, run.states(selection)
    inside = samples.inside & (groups >= 0)
    total, selected, wrong, known = (
        np.bincount(groups[inside & mask], minlength=size)
        for mask in (
            samples.inside,
            state == State.SELECTED,
            samples.measurable & (samples.given != (samples.given if samples.truth is None else samples.truth)),
            samples.measurable,
        )
    )
    flagged = groups[run.flagged[inside[run.flagged]]]
    doubted = np.bincount(flagged, minlength=size)
    return [
        {
            "samples": int(total[group]),
            "selected": int(selected[group]),
            "flagged": int(doubted[group]),
            "wrong": float(wrong[group] / known[group]) if known[group] else None,
        }
        for group in range(size)
    ]


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    claims = states_noise(report)
    return {
        "claims_noise": claims,
        "claimed": claimed_noise(report),
        "plot": _draw(report["noise"]) if claims else None,
        "tables": {"by-source": source_table(report), "by-class": label_table(report)},
    }


def _draw(noise: dict[str, Any]) -> Markup | None:
    """Plot the noise estimates as bars and, if known, the true ratio as a bar and a dashed line."""
    rows = (
        ("Paper's estimate", noise["paper"], 0),
        ("Confident estimate", noise["confident"], 1),
        ("Confidence curve", noise["confidence_curve"], 4),
        ("Both kinds of noise", noise.get("combined"), 2),
        ("Confirmed twice", noise["confirmed"], 3),
        ("Truth", noise["true"], 2),
    )
    bars = [Bar(label, value, share(value), colour) for label, value, colour in rows if value is not None]
    if not bars:
        return None
    return for_widths(bar_chart, bars, title="Share of wrong labels", reference=noise["true"], ticks=percent)


def label_table(report: Report) -> Table | None:
    """Return the noise of every class, by given label; None without a selection."""
    rows = (report["selection"] or {}).get("by_label")
    if not rows:
        return None
    names, measured = ClassNames(report), report["selection"]["by_class"]
    columns = [Column("class", "the given label", words=True), *_group_columns(report)]
    if measured:
        columns += [Column("precision", "LP of this true class"), Column("recall", "LR of this true class")]
    about = "the class that held-out predictions suggest most often for flagged labels"
    columns.append(Column("usual suggestion", about, words=True))
    cells = []
    for number, row in enumerate(rows):
        line = [names.cell(number), *_group_cells(report, row)]
        if measured:
            line += [percentage(measured[number][key]) for key in ("label_precision", "label_recall")]
        usual = f"{row['suggested_count']:,} of {row['flagged']:,}" if row["suggested"] is not None else ""
        cells.append([*line, names.cell(row["suggested"], usual)])
    return Table(columns, cells, "By class", sortable=True, search="Find a class", shown=SHOWN)


def source_table(report: Report) -> Table | None:
    """Return the noise of every source; None if there is only one."""
    if not report["by_source"]:
        return None
    columns = [Column("source", "the top folder of the keys", words=True), *_group_columns(report)]
    cells = [
        [Cell(shorten(row["name"], NAME), whole=row["name"]), *_group_cells(report, row)]
        for row in report["by_source"]
    ]
    return Table(columns, cells, "By source", sortable=True)


def _group_columns(report: Report) -> list[Column]:
    return [
        Column("labels"),
        Column("kept", "labels that INCV selected"),
        Column("flagged", "not selected, and contradicted by a network that did not train on the image"),
        *([Column("estimated wrong", "confident estimate")] if states_noise(report) else []),
        *([Column("truly wrong")] if report["noise"]["true"] is not None else []),
    ]


def _group_cells(report: Report, row: dict[str, Any]) -> list[Cell]:
    total = row["samples"]
    cells = [count(total)]
    for key in ("selected", "flagged"):
        part = row[key] / total if total else None
        cells.append(Cell(share(part), part, note=f"{row[key]:,}"))
    if states_noise(report):
        cells.append(percentage(row["estimated_wrong"]))
    if report["noise"]["true"] is not None:
        cells.append(percentage(row["wrong"]))
    return cells


SECTION = Section("noise", "Noise", collect, render, Path(__file__).with_suffix(".html"))
