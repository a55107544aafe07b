"""The section on how a run was made: its starts, their commands, the versions and the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.records.manifest import INCV_FROM
from trainer.report.run import ReportRun
from trainer.report.section import Cell, Column, Report, Section, Table
from trainer.report.sections.confusion import MATRIX_CLASSES

_LABELS = ("started", "resumed from", "ended", "steps", "processes", "threads", "hardware")


def collect(run: ReportRun) -> dict[str, Any]:
    starts = run.manifest.get("starts") or []
    resumed = sum(start.get("resumed_from") is not None for start in starts)
    return {
        "incv_from": run.manifest.get(INCV_FROM),
        "starts": {"count": len(starts), "resumed": resumed, "list": starts},
        "config": _without_large_matrix(run.config),
    }


def _without_large_matrix(config: dict[str, Any]) -> dict[str, Any]:
    """Replace a large noise matrix by a short description, because it is unreadable on a page."""
    labels = config.get("labels") or {}
    rows = len(labels.get("matrix") or ())
    if rows <= MATRIX_CLASSES:
        return config
    return config | {"labels": labels | {"matrix": f"{rows} x {rows} numbers, in config.resolved.yaml"}}


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    starts = start_rows(report)
    columns = [Column(label, words=True) for label in _LABELS]
    return {
        "table": Table(columns, [[Cell(row[label]) for label in _LABELS] for row in starts]),
        "commands": [row["command"] for row in starts],
        "versions": (report["starts"]["list"] or [{}])[-1].get("versions") or {},
        "config": yaml.safe_dump(report["config"], sort_keys=False, allow_unicode=True),
    }


def start_rows(report: Report) -> list[dict[str, str]]:
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


def _guess_end(report: Report, is_last: bool) -> str:
    """Return what became of a start that did not record its end."""
    if not is_last:
        return "killed"
    return "wrote this report" if "report" in report["time_s"] else "still running, or killed"


SECTION = Section("run", "How it was run", collect, render, Path(__file__).with_suffix(".html"))
