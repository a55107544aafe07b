"""Step two of the report: draw the plots of each section, from report.json alone."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from trainer.report.class_names import short_names
from trainer.report.plots import (
    NARROW,
    Bar,
    Series,
    bar_chart,
    for_widths,
    heatmap,
    line_chart,
    percent,
    plain,
    readable_width,
    stacked_bars,
)
from trainer.report.profile import shares, shown_phases
from trainer.report.summary import method_title, method_with, points, share, shows_removed
from trainer.report.text import format_duration

NAMED_CLASSES = 20  # with more classes, a heatmap labels only every fifth row and column
EVALUATED = {"train_given": "training images, given labels", "train_true": "training images, true labels"}
"""Sets of `evaluation.training_labels`, in words."""
STATES = (
    ("selected", "selected", "var(--c2)"),
    ("candidates", "candidates", "var(--c5)"),
    ("removed", "removed", "var(--c3)"),
    ("unusable", "unusable", "var(--faint)"),
)


def noise_plot(report: dict[str, Any]) -> Markup | None:
    """Plot the noise estimates as bars and, if known, the true ratio as a bar and a dashed line."""
    noise = report["noise"]
    rows = (
        ("Paper's estimate", noise["paper"], 0),
        ("Confident estimate", noise["confident"], 1),
        ("Confidence curve", noise.get("confidence_curve"), 4),
        ("Confirmed twice", noise.get("confirmed"), 3),
        ("Truth", noise["true"], 2),
    )
    bars = [Bar(label, value, share(value), colour) for label, value, colour in rows if value is not None]
    if not bars:
        return None
    return for_widths(
        lambda width: bar_chart(
            bars, title="Share of wrong labels", reference=noise["true"], ticks=percent, width=width
        )
    )


def precision_plot(report: dict[str, Any]) -> Markup | None:
    """Plot label precision and recall after each round: measured (solid) and theoretical (dashed)."""
    rounds = [entry for entry in report["rounds"] if entry["label_precision"] is not None]
    if not rounds:
        return None
    series = []
    for colour, (key, name) in enumerate((("label_precision", "precision"), ("label_recall", "recall"))):
        series.append(Series(name, [(entry["round"], entry[key]) for entry in rounds], colour))
        expected = [(entry["round"], entry["theory"][key]) for entry in rounds]
        series.append(Series(f"{name}, theory", expected, colour, dashed=True))
    numbers = [float(entry["round"]) for entry in rounds]
    low = min(y for line in series for _, y in line.points if y is not None)
    title = "Label precision and recall after each round, measured and by theory"
    return for_widths(
        lambda width: line_chart(
            series,
            title=title,
            x_label="round",
            x_ticks=numbers,
            y_range=(min(low, 0.9), 1.0),
            ticks=percent,
            size=(width, 300),
        )
    )


def losses_plot(report: dict[str, Any]) -> Markup | None:
    """Plot the distribution of the held-out losses of each state as an outline."""
    losses = report["losses"]
    if losses is None:
        return None
    edges, colours = losses["edges"], {"selected": 2, "candidates": 5, "removed": 3}
    series = [Series(name, _outline(edges, shares), colours[name]) for name, shares in losses["shares"].items()]
    return for_widths(
        lambda width: line_chart(
            series,
            title="Held-out loss by state",
            x_label="held-out loss of the given label",
            ticks=percent,
            size=(width, 300),
        )
    )


def _outline(edges: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float | None]]:
    """Return the outline of a histogram, from and to zero."""
    points_: list[tuple[float, float | None]] = [(edges[0], 0.0)]
    for low, high, height in zip(edges[:-1], edges[1:], heights, strict=True):
        points_ += [(low, height), (high, height)]
    return [*points_, (edges[-1], 0.0)]


def counts_plot(report: dict[str, Any]) -> Markup | None:
    """Plot the number of samples in each state after each round."""
    if not report["rounds"]:
        return None
    rows = []
    for entry in report["rounds"]:
        unusable = entry["unreadable"] + entry["non_finite"]
        counts = {**entry, "unusable": unusable}
        rows.append((f"round {entry['round']}", [counts[key] for key, _, _ in STATES]))
    always = 3 if shows_removed(report) else 2
    shown = [index for index in range(len(STATES)) if index < always or any(counts[index] for _, counts in rows)]
    rows = [(label, [counts[index] for index in shown]) for label, counts in rows]
    parts = [STATES[index][1:] for index in shown]
    return for_widths(lambda width: stacked_bars(rows, parts, title="Samples by state after each round", width=width))


def accuracy_plots(report: dict[str, Any]) -> dict[str, Markup]:
    """Return a bar chart for each evaluation set: bars are means over networks, dots are individual networks."""
    plots = {}
    headline = method_with(report, "headline", report.get("methods") or ())
    for name, results in (report["accuracy"] or {}).items():
        bars = [
            Bar(
                method_title(report, method),
                result["top1"],
                points(result["top1"]),
                2 if method == headline else 0,
                [value for value in result["top1_each"] if value is not None] if len(result["top1_each"]) > 1 else (),
            )
            for method, result in results.items()
            if result["top1"] is not None
        ]
        if bars:
            plots[name] = _accuracy_plot(bars, f"Top-1 accuracy on {name}")
    return plots


def _accuracy_plot(bars: Sequence[Bar], title: str) -> Markup:
    return for_widths(lambda width: bar_chart(bars, title=title, high=100, ticks=_points_tick, width=width), wide=960)


def time_plot(report: dict[str, Any]) -> Markup | None:
    bars = [
        Bar(stage, seconds, format_duration(seconds), 0)
        for stage, seconds in report["time_s"].items()
        if seconds is not None and (stage != "report" or seconds)  # 0: it writes this page
    ]
    if not bars:
        return None
    return for_widths(lambda width: bar_chart(bars, title="Time of each stage", ticks=None, width=width), wide=960)


def profile_plot(report: dict[str, Any]) -> Markup | None:
    """Plot the time share of each phase as one stacked bar per training."""
    trainings = report["profile"]
    if not trainings:
        return None
    phases = shown_phases(trainings)
    rows = [(each["training"], [shares(each)[phase] for phase, _, _ in phases]) for each in trainings]
    parts = [(words, colour) for _, words, colour in phases]
    title = "Time of each training by phase"
    return for_widths(lambda width: stacked_bars(rows, parts, title=title, width=width, ticks=share), wide=960)


def curve_panels(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return small panels, one per round and one per method, each with training loss and accuracy."""
    curves, order = report["curves"], report["config"].get("methods") or []
    methods = sorted(curves["methods"], key=lambda method: order.index(method) if method in order else len(order))
    groups = (
        ("INCV, one line per fold", {f"Round {number}": folds for number, folds in curves["rounds"].items()}),
        ("Methods", {method_title(report, method): {"": curves["methods"][method]} for method in methods}),
    )
    found = []
    for heading, runs in groups:
        charts = [
            _charts(runs, "loss", "training loss", plain),
            _charts(runs, "train_accuracy", "training accuracy", percent),
            _charts(runs, "accuracy", "accuracy on evaluation sets", percent),
        ]
        panels = [{"name": name, "charts": [chart[name] for chart in charts if name in chart]} for name in runs]
        if any(panel["charts"] for panel in panels):
            found.append({"heading": heading, "panels": [panel for panel in panels if panel["charts"]]})
    return found


def has_evaluations(report: dict[str, Any]) -> bool:
    """Whether a method was evaluated during its training."""
    return any(name.startswith("accuracy.") for columns in report["curves"]["methods"].values() for name in columns)


def _charts(runs: dict[str, Any], key: str, label: str, ticks: Any) -> dict[str, dict[str, Any]]:
    """Return a small chart of the metric `key` for each panel that has it, all on the same scale."""
    lines = {name: series for name, columns in runs.items() if (series := metric_lines(columns, key))}
    values = [y for series in lines.values() for line in series for _, y in line.points if y is not None]
    if not values:
        return {}
    scale = (min(0.0, *values), max(values) if key == "loss" else 1.0)
    return {
        name: {
            "label": label + ("; dashed: network b" if len({line.label for line in series}) < len(series) else ""),
            "plot": line_chart(
                series,
                title=f"{name}: {label}",
                x_label="epoch",
                size=(296, 180),
                y_range=scale,
                ticks=ticks,
                grows=True,
            ),
        }
        for name, series in lines.items()
    }


def metric_lines(runs: dict[str, dict[str, list[float | None]]], key: str) -> list[Series]:
    """Return a line for each training, evaluation set and network of the metric `key`, over epochs or steps.

    Columns: `key`, `key_a`, `key.<set>`, `key_a.<set>`. The mean over a pair's networks is not drawn beside them.
    With several trainings or sets, colour and legend tell them apart, and dashes mark network b.
    """
    found = []
    for run, columns in runs.items():
        named = {parts: name for name in columns if (parts := _parts_of(name, key))}
        for (network, evaluated), name in named.items():
            if network or ("a", evaluated) not in named:
                found.append(((run, evaluated), network, _points(columns, name)))
    groups = list(dict.fromkeys(group for group, _, points_ in found if points_))
    series: list[Series] = []
    for group, network, points_ in found:
        if not points_:
            continue
        run, evaluated = group[0], EVALUATED.get(group[1], group[1])
        about = ", ".join(part for part in (run, evaluated, f"network {network}" if network else "") if part) or key
        alone = len(groups) == 1
        label, colour = (about, len(series)) if alone else (evaluated or run, groups.index(group))
        series.append(Series(label, points_, colour, network == "b", about))
    return series


def _parts_of(name: str, key: str) -> tuple[str, str] | None:
    """Return the network (a, b or "") and the evaluation set (or "") of a column; None if it is no `key`."""
    metric, _, evaluated = name.partition(".")
    network = metric.removeprefix(key).removeprefix("_")
    return (network, evaluated) if metric == key or metric in (f"{key}_a", f"{key}_b") else None


def _points(columns: dict[str, list[float | None]], name: str) -> list[tuple[float, float | None]]:
    """Return a column over epochs or steps. None, which breaks the line, stands for a number that is not finite: the
    lines of the other kind (of steps, of evaluations) have no such number and are left out."""
    along, rates = columns.get("epoch") or columns.get("step"), columns.get("learning_rate")
    if along is None:
        return []
    of_steps = "." not in name
    return [
        (x, y)
        for place, (x, y) in enumerate(zip(along, columns[name], strict=True))
        if x is not None and (y is not None or rates is None or (rates[place] is not None) == of_steps)
    ]


def confusion_plots(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Plot T, M and the confident estimate of T as heatmaps on one scale; of many classes, the most confused."""
    kinds = (
        ("transition", "T: true class → given label", "true class", "given label"),
        ("predicted", "M: true class → held-out prediction", "true class", "predicted in round 1"),
        (
            "confident",
            "Confident estimate of T, without the true labels",
            "estimated true class",
            "given label",
        ),
    )
    names = tick_names(short_names(report["class_names"]))
    plots = [
        {"name": name, "plot": _matrix_plot(matrix, name, names, rows, columns)}
        for key, name, rows, columns in kinds
        if (matrix := report["confusion"][key]) is not None
    ]
    if (part := report["confusion"]["excerpt"]) is not None:
        chosen = [short_names(report["class_names"])[number] for number in part["classes"]]
        name = f"Estimated T, the {len(chosen)} most confused classes"
        plot = _matrix_plot(part["matrix"], name, chosen, "estimated true class", "given label")
        plots.append({"name": name, "plot": plot})
    return plots


def _matrix_plot(
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


def tick_names(names: Sequence[str]) -> list[str]:
    """Return the class names if they fit, else every fifth class number."""
    if len(names) <= NAMED_CLASSES:
        return list(names)
    return [str(number) if number % 5 == 0 else "" for number in range(len(names))]


def _points_tick(value: float) -> str:
    return f"{value:g} %"
