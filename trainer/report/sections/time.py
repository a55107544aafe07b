"""The time section: seconds of each stage and, with `--profile`, of each phase of each training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from shards.durable import read_json
from shards.errors import DataError
from trainer.methods.registry import method_names, title_of
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
    """Return the seconds of each stage, in the order in which stages run, and the profile."""
    stages = run.manifest.get("stages") or {}
    last = ("evaluate", "export", "report")
    order = {name: place for place, name in enumerate(("pack", "labels", "incv", *method_names(), *last))}
    names = sorted(stages, key=lambda name: order.get(name, len(order)))
    return {
        "time_s": {name: (stages[name] or {}).get("seconds") for name in names},
        "profile": _read_profile(run.directory.profile),
    }


def _read_profile(path: Path) -> list[dict[str, Any]] | None:
    """Return steps and seconds of each training, summed over the starts of a run, in run order, numbered from 1."""
    trainings: dict[tuple[Any, ...], dict[str, Any]] = {}
    try:
        for entry in read_json(path):
            name = tuple(entry[key] for key in ("stage", "round", "fold"))
            _add(trainings.setdefault(name, _nothing(*name)), entry)
    except (DataError, KeyError, TypeError, ValueError):  # missing or malformed: the report is written without it
        return None
    return list(trainings.values()) or None


def _nothing(stage: str, round_: int | None, fold: int | None) -> dict[str, Any]:
    from_one = [None if number is None else number + 1 for number in (round_, fold)]
    return {
        "training": title_of(stage) if round_ is None else f"Round {from_one[0]}, fold {from_one[1]}",
        "stage": stage,
        "round": from_one[0],
        "fold": from_one[1],
        "devices": [],
        "starts": 0,
        "steps": 0,
        "wall_s": 0.0,
        "seconds": {},
    }


def _add(training: dict[str, Any], entry: dict[str, Any]) -> None:
    training["starts"] += 1
    training["steps"] += int(entry["steps"])
    training["wall_s"] += float(entry["wall_s"])
    if str(entry["device"]) not in training["devices"]:
        training["devices"].append(str(entry["device"]))
    for phase, seconds in entry["seconds"].items():
        training["seconds"][phase] = training["seconds"].get(phase, 0.0) + float(seconds)


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
    return for_widths(lambda width: bar_chart(bars, title="Time of each stage", ticks=None, width=width), wide=960)


def _draw_phases(parts: list[tuple[dict[str, Any], dict[str, float]]], phases: list[tuple[str, str, str]]) -> Markup:
    """Plot the time share of each phase as one stacked bar per training."""
    rows = [(training["training"], [part[phase] for phase, _, _ in phases]) for training, part in parts]
    colours = [(words, colour) for _, words, colour in phases]
    title = "Time of each training by phase"
    return for_widths(lambda width: stacked_bars(rows, colours, title=title, width=width, ticks=share), wide=960)


def _phase_table(parts: list[tuple[dict[str, Any], dict[str, float]]], phases: list[tuple[str, str, str]]) -> Table:
    columns = [Column("training", words=True), Column("steps"), Column("time")]
    rows = []
    for training, part in parts:
        row = [Cell(training["training"]), count(training["steps"]), Cell(format_duration(training["wall_s"]))]
        rows.append([*row, *(percentage(part[phase]) for phase, _, _ in phases)])
    return Table([*columns, *(Column(words) for _, words, _ in phases)], rows)


SECTION = Section("time", "Time", collect, render, Path(__file__).with_suffix(".html"))
