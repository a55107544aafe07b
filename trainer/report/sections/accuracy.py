"""The accuracy section: top-1 and top-5 of each method and each of its networks on the evaluation sets."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shards.errors import ConfigError
from trainer.methods.registry import get_method, title_of
from trainer.report.plots import Bar, bar_chart, for_widths
from trainer.report.run import ReportRun
from trainer.report.section import Cell, Column, Report, Section, Table, count
from trainer.report.summary import method_title, method_with
from trainer.report.text import points


def collect(run: ReportRun) -> dict[str, Any]:
    evaluation = run.mapping(run.directory.evaluation)
    accuracy = None
    if evaluation is not None:
        accuracy = {
            name: {method: _percentages(counts) for method, counts in methods.items()}
            for name, methods in evaluation.items()
        }
    return {
        "methods": describe_methods(run.config.get("methods") or []),
        "accuracy": accuracy,
        "chosen_on": (run.config.get("evaluation") or {}).get("choose_on"),
    }


def describe_methods(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return title and role of each method from the registry; the title of an unregistered method is its name."""
    described: dict[str, dict[str, Any]] = {}
    for name in names:
        described[name] = {"title": title_of(name), "headline": False, "reference": False}
        with suppress(ConfigError):
            method = get_method(name)
            described[name] |= {"headline": method.role == "headline", "reference": method.role == "reference"}
    return described


def _percentages(counts: dict[str, Any]) -> dict[str, Any]:
    """Convert counts of evaluation.json to percentages; top1 and top5 are means over a method's networks."""
    images, networks, ensemble = counts["count"], counts["networks"], counts.get("ensemble")

    def share(right: float | None) -> float | None:
        return None if right is None or not images else 100 * right / images

    def mean(key: str) -> float | None:
        each = [network.get(key) for network in networks]
        return None if not each or None in each else share(sum(each) / len(each))

    return {
        "top1": mean("top1"),
        "top5": mean("top5"),
        "top1_each": [share(network["top1"]) for network in networks],
        "top1_ensemble": share(ensemble["top1"]) if ensemble else None,
        "top5_ensemble": share(ensemble.get("top5")) if ensemble else None,
        "count": images,
    }


def render(report: Report, run: ReportRun) -> Mapping[str, Any] | None:
    if not report["methods"]:
        return None
    return {"sets": {name: _show_set(report, name, results) for name, results in (report["accuracy"] or {}).items()}}


def _show_set(report: Report, name: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    counted = max((result["count"] for result in results.values()), default=0)
    return {
        "plot": _draw(report, name, results),
        "table": _table(report, name, results),
        "images": counted,
        "sampling_error": sampling_error(counted) if counted else None,
    }


def sampling_error(images: int) -> float:
    """Return half the 95 % interval of an accuracy in points, where it is largest: at an accuracy of 50 %."""
    return 196 * math.sqrt(0.25 / images)


def _draw(report: Report, name: str, results: dict[str, dict[str, Any]]) -> Markup | None:
    """Plot the means over networks as bars, and several networks as dots."""
    headline = method_with(report, "headline", report["methods"])
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
    if not bars:
        return None
    return for_widths(bar_chart, bars, title=f"Top-1 accuracy on {name}", high=100, ticks="{:g} %".format, wide=960)


def _table(report: Report, name: str, results: dict[str, dict[str, Any]]) -> Table:
    columns = [Column(name, words=True), Column("top-1"), Column("top-5"), Column("top-1 of each network")]
    columns += [Column("top-1 of the ensemble"), Column("images")]
    rows, strong = [], set()
    for place, (method, result) in enumerate(results.items()):
        if (report["methods"].get(method) or {}).get("headline"):
            strong.add(place)
        top5 = result["top5"] if report["classes"] > 5 else None
        each = ", ".join(points(value) for value in result["top1_each"])
        texts = (points(result["top1"]), points(top5), each, points(result["top1_ensemble"]))
        rows.append([Cell(method_title(report, method)), *map(Cell, texts), count(result["count"])])
    return Table(columns, rows, strong=frozenset(strong))


SECTION = Section("accuracy", "Accuracy", collect, render, Path(__file__).with_suffix(".html"))
