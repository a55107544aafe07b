"""The time section: seconds of each stage, and how fast each training went."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.methods.registry import title_of
from trainer.report.metrics_file import read_pace
from trainer.report.plots import Bar, bar_chart, for_widths
from trainer.report.run import ReportRun
from trainer.report.section import Cell, Column, Report, Section, Table, percentage
from trainer.report.text import format_duration


def collect(run: ReportRun) -> dict[str, Any]:
    """Return the seconds of each stage, in the manifest's order, in which stages run, and the pace of trainings."""
    stages = run.manifest.get("stages") or {}
    return {
        "time_s": {name: (entry or {}).get("seconds") for name, entry in stages.items()},
        "pace": _collect_pace(run),
    }


def _collect_pace(run: ReportRun) -> list[dict[str, Any]]:
    """Return images per second and the share of data wait of each training, in run order."""
    paths = {
        f"Round {round_ + 1}, fold {fold + 1}": path for (round_, fold), path in run.directory.fold_metrics().items()
    }
    methods, order = run.directory.method_metrics(), run.config.get("methods") or []
    for name in sorted(methods, key=lambda name: order.index(name) if name in order else len(order)):
        paths[title_of(name)] = methods[name]
    measured = {training: pace for training, path in paths.items() if (pace := read_pace(path)) is not None}
    return [
        {"training": training, "images_per_s": rate, "data_wait": wait} for training, (rate, wait) in measured.items()
    ]


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    columns = [Column("training", words=True), Column("images per second"), Column("data wait")]
    rows = [
        [Cell(each["training"]), Cell(f"{each['images_per_s']:,.0f}"), percentage(each["data_wait"])]
        for each in report["pace"]
    ]
    return {"stages": _draw_stages(report["time_s"]), "pace": Table(columns, rows) if rows else None}


def _draw_stages(seconds: dict[str, float | None]) -> Markup | None:
    bars = [
        Bar(stage, each, format_duration(each), 0)
        for stage, each in seconds.items()
        if each is not None and (stage != "report" or each)  # 0: it writes this page
    ]
    if not bars:
        return None
    return for_widths(bar_chart, bars, title="Time of each stage", ticks=None, wide=960)


SECTION = Section("time", "Time", collect, render, Path(__file__).with_suffix(".html"))
