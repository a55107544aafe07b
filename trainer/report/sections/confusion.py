"""The confusion section: the noise matrix, its estimate, and which classes labels and networks confuse."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from trainer.incv import measure
from trainer.report.plots import NARROW, heatmap, readable_width
from trainer.report.run import ReportRun
from trainer.report.section import ClassNames, Column, Report, Section, Table, count, percentage
from trainer.report.summary import states_noise
from trainer.report.text import short_names

MATRIX_CLASSES = 50  # with more classes a matrix is too large to read: only its largest entries are kept
NAMED_CLASSES = 20  # with more classes, a heatmap labels only every fifth row and column
EXCERPT = 20  # classes in the excerpt of a transition matrix that is too large to show
WORST_PAIRS = 15


def collect(run: ReportRun) -> dict[str, Any]:
    """Return T, its confident estimate, M from the held-out predictions of round 1, and the most confused pairs.

    Those of `flagged` are given and suggested classes; those of the others start at the true class.
    """
    samples, confident = run.samples, ((run.incv or {}).get("noise") or {}).get("transition")
    small = samples.classes <= MATRIX_CLASSES
    given_pairs = predicted_pairs = transition = predicted_matrix = prior = None
    predicted = run.first_predictions()
    if samples.known is not None:
        true, given = samples.known
        prior = measure.class_prior(true, samples.classes)
        transition = _rounded(measure.confusion(true, given, samples.classes)) if small else None
        given_pairs = _count_pairs(measure.confusion_counts(true, given, samples.classes))
        if predicted is not None:
            seen = predicted[samples.measurable]
            predicted_matrix = _rounded(measure.confusion(true, seen, samples.classes)) if small else None
            predicted_pairs = _count_pairs(measure.confusion_counts(true, seen, samples.classes))
    flagged_pairs = None
    if run.selection is not None:
        labels = np.bincount(samples.given[samples.inside], minlength=samples.classes)
        flagged_pairs = _count_pairs(run.flagged_pairs, labels)
    estimated = None if run.joint is None else _estimated_pairs(run.joint, int(samples.inside.sum()))
    confusion = {
        "prior": prior,
        "transition": transition,
        "confident": _rounded(np.array(confident, dtype=np.float64)) if small and confident else None,
        "predicted": predicted_matrix,
        "pairs": {"given": given_pairs, "predicted": predicted_pairs, "flagged": flagged_pairs},
        "estimated_pairs": estimated,
        "excerpt": None if small or run.joint is None else _excerpt(run.joint, estimated or []),
    }
    return {"confusion": confusion}


def _worst_pairs(matrix: NDArray) -> list[tuple[int, int]]:
    """Return row and column of the largest entries off the diagonal."""
    entries = matrix.copy()
    np.fill_diagonal(entries, 0)
    order = np.argsort(-entries, axis=None, kind="stable")[:WORST_PAIRS]
    pairs = [(int(place // len(matrix)), int(place % len(matrix))) for place in order]
    return [(i, j) for i, j in pairs if i != j]


def _count_pairs(counts: NDArray[np.int64], totals: NDArray[np.int64] | None = None) -> list[dict[str, Any]]:
    """Return the most frequent off-diagonal pairs (from, to), each with its count and share of the class `from`.

    totals: labels of each class; by default all that are counted.
    """
    totals = counts.sum(axis=1) if totals is None else totals
    return [
        {"from": i, "to": j, "count": int(counts[i, j]), "share": counts[i, j] / totals[i]}
        for i, j in _worst_pairs(counts)
        if counts[i, j]
    ]


def _estimated_pairs(joint: NDArray[np.float64], samples: int) -> list[dict[str, Any]]:
    """Return the classes that the labels are estimated to confuse most: from the true class to the given label.

    Each has the estimated number of labels, and their share of the true class. joint: [given, true].
    """
    true = joint.T.copy()
    totals = true.sum(axis=1)
    found = [(i, j, float(true[i, j])) for i, j in _worst_pairs(true)]
    return [
        {"from": i, "to": j, "count": round(part * samples), "share": measure.or_none(part / totals[i])}
        for i, j, part in found
        if part * samples >= 0.5
    ]


def _excerpt(joint: NDArray[np.float64], pairs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the part of the estimated transition matrix that has the most confused classes: {classes, matrix}."""
    classes = sorted(list(dict.fromkeys(each[end] for each in pairs for end in ("from", "to")))[:EXCERPT])
    if len(classes) < 2:
        return None
    true = joint.T
    totals = true.sum(axis=1)[classes]
    part = true[np.ix_(classes, classes)]
    matrix = np.divide(part, totals[:, None], out=np.full(part.shape, np.nan), where=totals[:, None] > 0)
    return {"classes": classes, "matrix": _rounded(matrix)}


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    plots, tables = _draw(report) if states_noise(report) else {}, _pair_tables(report)
    return {"plots": plots, "tables": tables} if plots or tables or report["selection"] is None else None


def _draw(report: Report) -> dict[str, Markup]:
    """Plot T, M and the confident estimate of T as heatmaps on one scale; of many classes, the most confused."""
    confident = "Confident estimate of T, without the true labels"
    kinds = (
        ("transition", "T: true class → given label", "true class", "given label"),
        ("predicted", "M: true class → held-out prediction", "true class", "predicted in round 1"),
        ("confident", confident, "estimated true class", "given label"),
    )
    names, confusion = short_names(report["class_names"]), report["confusion"]
    ticks = names
    if len(names) > NAMED_CLASSES:
        ticks = [str(number) if number % 5 == 0 else "" for number in range(len(names))]
    plots = {
        title: _draw_matrix(confusion[key], title, ticks, rows, columns)
        for key, title, rows, columns in kinds
        if confusion[key] is not None
    }
    if (part := confusion["excerpt"]) is not None:
        chosen = [names[number] for number in part["classes"]]
        title = f"Estimated T, the {len(chosen)} most confused classes"
        plots[title] = _draw_matrix(part["matrix"], title, chosen, "estimated true class", "given label")
    return plots


def _draw_matrix(
    matrix: Sequence[Sequence[float | None]], title: str, names: Sequence[str], rows: str, columns: str
) -> Markup:
    """Draw a matrix, which a phone scrolls sideways if it is wide. If its cells have numbers, it is drawn for phones
    too, with cells as large as the numbers need."""

    def draw(width: int, longest: int = 12) -> Markup:
        return heatmap(
            matrix, title=title, names=names, row_label=rows, column_label=columns, width=width, longest=longest
        )

    if len(matrix) > NAMED_CLASSES:
        return Markup('<div class="scroll">{}</div>').format(draw(480))
    return Markup('<div class="wide">{}</div><div class="narrow scroll">{}</div>').format(
        draw(480), draw(max(NARROW, readable_width(names, 8)), 8)
    )


def _pair_tables(report: Report) -> list[Table]:
    """Return the classes that are most confused by the true labels, if they are known."""
    pairs, names = report["confusion"]["pairs"], ClassNames(report)
    kinds = (
        ("Most frequent wrong labels, by the true labels", "labelled", pairs["given"]),
        ("Most confused classes in held-out predictions", "predicted", pairs["predicted"]),
    )
    tables = []
    for title, target, found in kinds:
        if found is None:
            continue
        columns = [
            Column("true class", words=True),
            Column(target, words=True),
            Column("samples"),
            Column("of the class"),
        ]
        rows = [
            [names.cell(each["from"]), names.cell(each["to"]), count(each["count"]), percentage(each["share"])]
            for each in found[:10]
        ]
        tables.append(Table(columns, rows, title, compact=True))
    return tables


def _rounded(matrix: NDArray[np.float64]) -> list[list[float]]:
    return np.round(matrix, 5).tolist()


SECTION = Section("confusion", "Confusion", collect, render, Path(__file__).with_suffix(".html"))
