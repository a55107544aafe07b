"""The selection section: what each round selected, beside the theory, and how the held-out losses are distributed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from trainer import theory
from trainer.incv import measure
from trainer.incv.selection_index import State
from trainer.report.plots import Series, for_widths, line_chart, percent, stacked_bars
from trainer.report.run import ReportRun, RunSamples
from trainer.report.section import LISTED, Cell, Column, Report, Section, Table, count, percentage
from trainer.report.sections.noise import describe_labels
from trainer.report.summary import shows_removed
from trainer.report.text import share

BINS = 40
STATES = {"selected": State.SELECTED, "candidates": State.CANDIDATE, "removed": State.REMOVED}
_COLOURS = {"selected": 2, "candidates": 5, "removed": 3}
_UNUSABLE = ("unreadable", "non_finite")
_QUALITY = ("label_precision", "label_recall")


def collect(run: ReportRun) -> dict[str, Any]:
    incv = run.incv or {}
    return {
        "rounds": _measure_rounds(run, incv.get("rounds") or []),
        "selection": _describe(run),
        "losses": _measure_losses(run),
        "filled_classes": incv.get("filled_classes"),
        "ended_early": incv.get("ended_early"),
    }


def _measure_rounds(run: ReportRun, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per finished round, cumulative over rounds. notes: the round entries of incv.json."""
    rounds = []
    for index, path in run.rounds("selection.parquet").items():
        state = run.states(run.selection_of(path))
        note = notes[index] if index < len(notes) else {}
        entry: dict[str, Any] = {"round": index + 1, **_counts(state, run.samples)}
        entry |= {key: note.get(key) for key in ("agreement", "remove_ratio", "network")}
        rounds.append(entry | _against_truth(state, run.samples) | {"theory": _theory(run.samples, index + 1)})
    return rounds


def _describe(run: ReportRun) -> dict[str, Any] | None:
    """Describe the last selection: counts, precision and recall (total, by true class), and by given label."""
    if run.selection is None:
        return None
    samples, state = run.samples, run.states(run.selection)
    entry: dict[str, Any] = {**_counts(state, samples), **_against_truth(state, samples), "by_class": None}
    if samples.known is not None:
        selected = (state == State.SELECTED)[samples.measurable]
        true, given = samples.known
        columns = (
            np.bincount(true, minlength=samples.classes),
            np.bincount(true[selected], minlength=samples.classes),
            measure.label_precision_by_class(true, given, selected, samples.classes),
            measure.label_recall_by_class(true, given, selected, samples.classes),
        )
        keys = ("samples", "selected", *_QUALITY)
        entry["by_class"] = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    return entry | {"by_label": describe_labels(run, run.selection)}


def _counts(state: NDArray[np.int8], samples: RunSamples) -> dict[str, int]:
    tally = np.bincount(state[samples.inside], minlength=len(State))
    counted = STATES | {"unreadable": State.UNREADABLE, "non_finite": State.NON_FINITE}
    return {name: int(tally[each]) for name, each in counted.items()}


def _against_truth(state: NDArray[np.int8], samples: RunSamples) -> dict[str, float | None]:
    """Return label precision and recall of the selected samples, and the share of wrong labels among the removed."""
    if samples.known is None:
        return {"label_precision": None, "label_recall": None, "removed_noise": None}
    true, given = samples.known
    state = state[samples.measurable]
    selected, removed = state == State.SELECTED, state == State.REMOVED
    return {
        "label_precision": measure.or_none(measure.label_precision(true, given, selected)),
        "label_recall": measure.or_none(measure.label_recall(true, given, selected)),
        "removed_noise": measure.or_none(measure.realised_noise(true[removed], given[removed])),
    }


def _theory(samples: RunSamples, rounds: int) -> dict[str, float] | None:
    """Return label precision and recall after `rounds` rounds as the theory of a memorising network predicts them."""
    if samples.known is None:
        return None
    true, given = samples.known
    prior = measure.class_prior(true, samples.classes)
    transition = measure.confusion(true, given, samples.classes)
    absent = prior == 0
    transition[absent] = np.eye(samples.classes)[absent]  # any distribution will do: its weight is 0
    return {
        "label_precision": float(theory.label_precision_after(transition, prior, rounds)),
        "label_recall": float(theory.label_recall_after(transition, prior, rounds)),
    }


def _measure_losses(run: ReportRun) -> dict[str, Any] | None:
    """Return the edges of the bins and, for each state with samples, the share of its losses in each bin.

    The last bin also has all larger losses. None if no sample has a loss.
    """
    selection = run.selection
    if selection is None:
        return None
    inside = run.samples.inside[: len(selection.state)] & np.isfinite(selection.loss)
    losses = {name: selection.loss[inside & (selection.state == state)] for name, state in STATES.items()}
    every = np.concatenate(list(losses.values()))
    if not len(every):
        return None
    high = float(np.quantile(every, 0.995)) or 1.0
    edges = np.linspace(0.0, high, BINS + 1)
    shares = {
        name: (np.histogram(np.clip(values, 0.0, high), edges)[0] / len(values)).round(6).tolist()
        for name, values in losses.items()
        if len(values)
    }
    medians = {name: round(float(np.median(losses[name])), 4) for name in shares}
    return {"edges": edges.round(6).tolist(), "shares": shares, "medians": medians}


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    if not report["rounds"]:
        return {"table": None}
    return {
        "last": report["rounds"][-1],
        "quality_plot": _draw_quality(report),
        "counts_plot": _draw_counts(report),
        "losses_plot": _draw_losses(report["losses"]),
        "table": _rounds_table(report),
        "filled": (report["filled_classes"] or [])[:LISTED],
    }


def _draw_quality(report: Report) -> Markup | None:
    """Plot label precision and recall after each round: measured (solid) and theoretical (dashed)."""
    rounds = [entry for entry in report["rounds"] if entry["label_precision"] is not None]
    if not rounds:
        return None
    series = []
    for colour, key in enumerate(_QUALITY):
        name = key.removeprefix("label_")
        series.append(Series(name, [(entry["round"], entry[key]) for entry in rounds], colour))
        expected = [(entry["round"], entry["theory"][key]) for entry in rounds]
        series.append(Series(f"{name}, theory", expected, colour, dashed=True))
    low = min(y for line in series for _, y in line.points if y is not None)
    return for_widths(
        line_chart,
        series,
        title="Label precision and recall after each round, measured and by theory",
        x_label="round",
        x_ticks=[float(entry["round"]) for entry in rounds],
        y_range=(min(low, 0.9), 1.0),
        ticks=percent,
        height=300,
    )


def _draw_losses(losses: dict[str, Any] | None) -> Markup | None:
    """Plot the distribution of the held-out losses of each state as an outline."""
    if losses is None:
        return None
    series = [
        Series(name, _outline(losses["edges"], shares), _COLOURS[name]) for name, shares in losses["shares"].items()
    ]
    title, x_label = "Held-out loss by state", "held-out loss of the given label"
    return for_widths(line_chart, series, title=title, x_label=x_label, ticks=percent, height=300)


def _outline(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float | None]]:
    """Return the outline of a histogram, from and to zero."""
    points: list[tuple[float, float | None]] = [(edges[0], 0.0)]
    for low, high, height in zip(edges[:-1], edges[1:], heights, strict=True):
        points += [(low, height), (high, height)]
    return [*points, (edges[-1], 0.0)]


def _draw_counts(report: Report) -> Markup:
    """Plot the number of samples in each state after each round."""
    rounds = [entry | {"unusable": sum(entry[key] for key in _UNUSABLE)} for entry in report["rounds"]]
    always = {"selected", "candidates"} | ({"removed"} if shows_removed(report) else set())
    shown = [key for key in (*STATES, "unusable") if key in always or any(entry[key] for entry in rounds)]
    rows = [(f"round {entry['round']}", [entry[key] for key in shown]) for entry in rounds]
    parts = [(key, f"var(--c{_COLOURS[key]})" if key in _COLOURS else "var(--faint)") for key in shown]
    return for_widths(stacked_bars, rows, parts, title="Samples by state after each round")


def _rounds_table(report: Report) -> Table:
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
            expected = entry["theory"] or {}
            notes = {key: f"({share(expected.get(key))})" if expected else "" for key in _QUALITY}
            row += [Cell(share(entry[key]), note=note) for key, note in notes.items()]
            row += [percentage(entry["removed_noise"])]
        rows.append(row)
    return Table(columns, rows)


SECTION = Section("selection", "Selection", collect, render, Path(__file__).with_suffix(".html"))
