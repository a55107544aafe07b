"""The time section: seconds of each stage and, with `--profile`, of each phase of each training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shards.durable import read_json
from shards.errors import DataError
from trainer.methods.registry import title_of
from trainer.report.plots import Bar, bar_chart, for_widths, stacked_bars
from trainer.report.run import ReportRun
from trainer.report.section import Cell, Column, Report, Section, Table, count, percentage
from trainer.report.text import format_duration, share

PHASES = (
    ("data_wait", "data wait", "var(--c3)"),
    ("step", "step", "var(--c2)"),
    ("predict", "predict", "var(--c6)"),
    ("checkpoint", "checkpoint", "var(--c7)"),
    ("warm_up", "warm-up", "var(--c4)"),
    ("other", "other", "var(--faint)"),
)
"""Key, label and colour."""


def collect(run: ReportRun) -> dict[str, Any]:
    """Return the seconds of each stage, in the manifest's order, in which stages run, and the profile."""
    stages = run.manifest.get("stages") or {}
    return {
        "time_s": {name: (entry or {}).get("seconds") for name, entry in stages.items()},
        "profile": _read_profile(run.directory.profile),
    }


def _read_profile(path: Path) -> list[dict[str, Any]] | None:
    """Return steps and seconds of each training, summed over the starts of a run, in run order, numbered from 1."""
    trainings: dict[tuple[str, int | None, int | None], list[dict[str, Any]]] = {}
    try:
        for entry in read_json(path):
            trainings.setdefault((entry["stage"], entry["round"], entry["fold"]), []).append(entry)
        return [_add_up(*name, entries) for name, entries in trainings.items()] or None
    except (DataError, KeyError, TypeError, ValueError):  # missing or malformed: the report is written without it
        return None


def _add_up(stage: str, round_: int | None, fold: int | None, starts: list[dict[str, Any]]) -> dict[str, Any]:
    round_, fold = (None if number is None else number + 1 for number in (round_, fold))
    phases = dict.fromkeys(phase for start in starts for phase in start["seconds"])
    return {
        "training": title_of(stage) if round_ is None else f"Round {round_}, fold {fold}",
        "stage": stage,
        "round": round_,
        "fold": fold,
        "devices": list(dict.fromkeys(str(start["device"]) for start in starts)),
        "starts": len(starts),
        "steps": sum(int(start["steps"]) for start in starts),
        "wall_s": sum(float(start["wall_s"]) for start in starts),
        "seconds": {phase: sum(float(start["seconds"].get(phase, 0.0)) for start in starts) for phase in phases},
    }


def render(report: Report, run: ReportRun) -> Mapping[str, Any]:
    trainings = report["profile"] or []
    devices = sorted({device for training in trainings for device in training["devices"]})
    phases = [each for each in PHASES if any(each[0] in training["seconds"] for training in trainings)]
    parts = [(training, _shares(training)) for training in trainings]
    return {
        "stages": _draw_stages(report["time_s"]),
        "phases": _draw_phases(parts, phases) if parts else None,
        "table": _phase_table(parts, phases),
        "devices": ["the CPU" if device == "CPU" else device for device in devices],
        "on_gpu": any(device != "CPU" for device in devices),
        "predicts": any(key == "predict" for key, _, _ in phases),
    }


def _shares(training: dict[str, Any]) -> dict[str, float]:
    """Return the share of a training's time by phase; the shares sum to 1."""
    seconds = training["seconds"]
    whole = sum(seconds.values()) or 1.0
    return {phase: seconds.get(phase, 0.0) / whole for phase, _, _ in PHASES}


def _draw_stages(seconds: dict[str, float | None]) -> Markup | None:
    bars = [
        Bar(stage, each, format_duration(each), 0)
        for stage, each in seconds.items()
        if each is not None and (stage != "report" or each)  # 0: it writes this page
    ]
    if not bars:
        return None
    return for_widths(bar_chart, bars, title="Time of each stage", ticks=None, wide=960)


def _draw_phases(parts: list[tuple[dict[str, Any], dict[str, float]]], phases: list[tuple[str, str, str]]) -> Markup:
    """Plot the time share of each phase as one stacked bar per training."""
    rows = [(training["training"], [part[phase] for phase, _, _ in phases]) for training, part in parts]
    colours = [(words, colour) for _, words, colour in phases]
    return for_widths(stacked_bars, rows, colours, title="Time of each training by phase", ticks=share, wide=960)


def _phase_table(parts: list[tuple[dict[str, Any], dict[str, float]]], phases: list[tuple[str, str, str]]) -> Table:
    columns = [Column("training", words=True), Column("steps"), Column("time")]
    rows = []
    for training, part in parts:
        row = [Cell(training["training"]), count(training["steps"]), Cell(format_duration(training["wall_s"]))]
        rows.append([*row, *(percentage(part[phase]) for phase, _, _ in phases)])
    return Table([*columns, *(Column(words) for _, words, _ in phases)], rows)


SECTION = Section("time", "Time", collect, render, Path(__file__).with_suffix(".html"))
