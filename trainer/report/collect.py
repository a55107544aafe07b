"""The sections of the report in their order on the page, and the content of report.json that they collect."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import ConfigError
from shards.plugins import PluginGroup
from shards.sources import list_sources
from trainer.report.run import ReportRun
from trainer.report.section import Section
from trainer.report.sections import (
    accuracy,
    confusion,
    curves,
    examination,
    gallery,
    history,
    images,
    look_first,
    next_steps,
    noise,
    second_look,
    selection,
    time,
)
from trainer.report.signals import measure_signals
from trainer.report.trust import judge

SECTIONS = (
    noise.SECTION,
    selection.SECTION,
    accuracy.SECTION,
    curves.SECTION,
    confusion.SECTION,
    look_first.SECTION,
    gallery.SECTION,
    second_look.SECTION,
    next_steps.SECTION,
    examination.SECTION,
    images.SECTION,
    time.SECTION,
    history.SECTION,
)
"""The built-in sections, in their order on the page; sections of other packages follow."""
PLUGINS = PluginGroup("incv.report_sections", "report section")


def list_sections() -> list[Section]:
    """Return the built-in sections, then those of installed packages; raises ConfigError if one is unusable."""
    built_in = [section.name for section in SECTIONS]
    found = [PLUGINS.find(name, built_in) for name in PLUGINS.names()]
    return [*SECTIONS, *(PLUGINS.load(entry, Section) for entry in found if entry is not None)]


def collect_report(run: ReportRun) -> dict[str, Any]:
    """Return the content of report.json; values are None if the run is unfinished or has no true labels."""
    samples = run.samples
    report: dict[str, Any] = {
        "data": _name_data(run),
        "recipe": run.manifest.get("recipe"),
        "seed": run.config.get("seed"),
        "model": (run.config.get("model") or {}).get("name"),
        "source": (run.manifest.get("dataset") or {}).get("source"),
        "samples": int(samples.inside.sum()),
        "classes": samples.classes,
        "class_names": samples.names,
        "calibrated": run.is_calibrated,
        "truth_known": int(samples.measurable.sum()),
        "missing": _find_missing(run),
        "gaps": run.find_gaps(),
        "trust": None,
    }
    for section in list_sections():
        content = section.collect(run)
        if taken := sorted(report.keys() & content.keys()):
            raise ConfigError(f"the report section {section.name!r} adds {taken[0]!r}, a key that report.json has")
        report |= content
    signals = measure_signals(run, report)
    if signals is not None:
        report["trust"] = judge(signals).as_json() | {"signals": asdict(signals)}
    return _to_json(report)


def _name_data(run: ReportRun) -> str | None:
    """Return the name of the user's folder or of the data set; None if it is unknown."""
    train = (run.config.get("data") or {}).get("train") or {}
    source = (run.manifest.get("dataset") or {}).get("source") or train.get("source")
    if source in {each.name for each in list_sources() if not each.splits}:
        return Path(os.path.abspath(train["root"])).name if train.get("root") else None
    return source


def _find_missing(run: ReportRun) -> dict[str, str]:
    """Return one sentence for each empty part of the report that says why it is empty."""
    reasons = {}
    if run.samples.truth is None:
        reasons["truth"] = (
            "The true labels of this data set are unknown, so precision, recall and the true noise ratio "
            "cannot be measured."
        )
    if run.incv is None:
        reasons["incv"] = "The incv stage has not finished in this run, so there is no noise estimate."
    if not run.rounds("selection.parquet"):
        reasons["rounds"] = "No round of INCV has finished in this run, so nothing has been selected."
    if run.config.get("methods") and run.mapping(run.directory.evaluation) is None:
        reasons["evaluation"] = "The evaluate stage has not finished in this run, so there is no accuracy."
    return reasons


def _to_json(value: Any) -> Any:
    """Convert to strict JSON: NaN and infinity become None, NumPy scalars numbers, keys and other types strings."""
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic):
        return _to_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
