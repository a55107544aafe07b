"""The training section: curves from the metrics.jsonl files, thinned to at most 200 points of each kind."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.report.metrics_file import Columns, read_metrics
from trainer.report.plots import Series, line_chart, percent, plain
from trainer.report.run import ReportRun
from trainer.report.section import Report, Section
from trainer.report.summary import method_title

EVALUATED = {"train_given": "training images, given labels", "train_true": "training images, true labels"}
"""Sets of `evaluation.training_labels`, in words."""


def collect(run: ReportRun) -> dict[str, Any]:
    """Return {"rounds": {"1": {"fold 1": columns, ...}}, "methods": {method: columns}}; numbered from 1."""
    rounds: dict[str, dict[str, Columns]] = {}
    for (number, fold), path in run.directory.fold_metrics().items():
        if columns := read_metrics(path):
            rounds.setdefault(str(number + 1), {})[f"fold {fold + 1}"] = columns
    paths = run.directory.method_metrics().items()
    methods = {name: columns for name, path in paths if (columns := read_metrics(path))}
    return {"curves": {"rounds": rounds, "methods": methods}}


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    groups = curve_panels(report)
    if not groups and report["calibrated"] and not report["config"].get("methods"):
        return None  # a judge by features trains no network
    return {"groups": groups, "evaluated": has_evaluations(report)}


def curve_panels(report: Report) -> list[dict[str, Any]]:
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


def has_evaluations(report: Report) -> bool:
    """Whether a method was evaluated during its training."""
    return any(name.startswith("accuracy.") for columns in report["curves"]["methods"].values() for name in columns)


def _charts(runs: dict[str, Any], key: str, label: str, ticks: Callable[[float], str]) -> dict[str, dict[str, Any]]:
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
                width=296,
                height=180,
                y_range=scale,
                ticks=ticks,
                grows=True,
            ),
        }
        for name, series in lines.items()
    }


def metric_lines(runs: dict[str, Columns], key: str) -> list[Series]:
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


def _points(columns: Columns, name: str) -> list[tuple[float, float | None]]:
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


SECTION = Section("curves", "Training", collect, render, Path(__file__).with_suffix(".html"))
