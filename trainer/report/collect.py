"""Step one of the report: everything a run directory knows, as one JSON-ready mapping of numbers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shards.durable import read_json
from trainer.config.schema import STAGES
from trainer.report.curves import read_curves
from trainer.report.measured import (
    MATRIX_CLASSES,
    RunSamples,
    final_selection,
    measure_confusion,
    measure_rounds,
    read_samples,
)
from trainer.report.profile import read_profile
from trainer.report.suspects import find_suspects
from trainer.report.unreadable import find_unreadable


def collect_report(run_dir: Path) -> dict[str, Any]:
    """The content of report.json; what the run has not done yet, or has no truth for, is None."""
    config = yaml.safe_load((run_dir / "config.resolved.yaml").read_text()) or {}
    manifest = read_json(run_dir / "manifest.json")
    incv = _optional(run_dir / "incv.json")
    samples = read_samples(run_dir, _class_names(manifest))
    starts = manifest.get("starts") or []
    noise = (incv or {}).get("noise") or {}
    report = {
        "recipe": manifest.get("recipe"),
        "seed": config.get("seed"),
        "model": (config.get("model") or {}).get("name"),
        "source": (manifest.get("dataset") or {}).get("source"),
        "samples": int(samples.inside.sum()),
        "classes": samples.classes,
        "class_names": samples.names,
        "truth_known": int(samples.measurable.sum()),
        "noise": {
            "paper": noise.get("paper"),
            "confident": noise.get("confident"),
            "true": samples.realised_noise(),
        },
        "rounds": measure_rounds(run_dir, samples, (incv or {}).get("rounds") or []),
        "selection": final_selection(run_dir, samples),
        "filled_classes": (incv or {}).get("filled_classes"),
        "ended_early": (incv or {}).get("ended_early"),
        "confusion": measure_confusion(run_dir, samples, noise.get("transition")),
        "accuracy": accuracy(_optional(run_dir / "evaluation.json")),
        "unreadable": find_unreadable(run_dir),
        "suspicious": find_suspects(run_dir, samples),
        "curves": read_curves(run_dir),
        "time_s": stage_times(manifest.get("stages") or {}),
        "profile": read_profile(run_dir),
        "starts": {
            "count": len(starts),
            "resumed": sum(start.get("resumed_from") is not None for start in starts),
            "list": starts,
        },
        "config": _without_large_matrix(config),
        "missing": missing(run_dir, samples),
    }
    return strict(report)


def _without_large_matrix(config: dict[str, Any]) -> dict[str, Any]:
    """A million numbers are of no use on a page; config.resolved.yaml has them."""
    labels = config.get("labels") or {}
    rows = len(labels.get("matrix") or ())
    if rows <= MATRIX_CLASSES:
        return config
    return config | {"labels": labels | {"matrix": f"{rows} x {rows} numbers, in config.resolved.yaml"}}


def accuracy(evaluation: dict[str, Any] | None) -> dict[str, dict[str, dict[str, Any]]] | None:
    """Percent from exact counts: top1 and top5 are means over a method's networks."""
    if evaluation is None:
        return None
    return {
        name: {method: _percentages(counts) for method, counts in methods.items()}
        for name, methods in evaluation.items()
    }


def _percentages(counts: dict[str, Any]) -> dict[str, Any]:
    count, networks, ensemble = counts["count"], counts["networks"], counts.get("ensemble")

    def share(right: float | None) -> float | None:
        return None if right is None or not count else 100 * right / count

    def mean(key: str) -> float | None:
        each = [network.get(key) for network in networks]
        return None if not each or None in each else share(sum(each) / len(each))

    return {
        "top1": mean("top1"),
        "top5": mean("top5"),
        "top1_each": [share(network["top1"]) for network in networks],
        "top1_ensemble": share(ensemble["top1"]) if ensemble else None,
        "top5_ensemble": share(ensemble.get("top5")) if ensemble else None,
        "count": count,
    }


def stage_times(stages: dict[str, Any]) -> dict[str, float | None]:
    """Seconds of each stage, in the order of the road data takes."""
    order = {name: place for place, name in enumerate(STAGES)}
    names = sorted(stages, key=lambda name: order.get(name, len(order)))
    return {name: (stages[name] or {}).get("seconds") for name in names}


def missing(run_dir: Path, samples: RunSamples) -> dict[str, str]:
    """Why a part of the report is empty, in a sentence for its reader."""
    reasons = {}
    if samples.truth is None:
        reasons["truth"] = (
            "The true labels of this data set are not known, so nothing can be measured against them: "
            "precision, recall and the true noise stay open."
        )
    if not (run_dir / "incv.json").exists():
        reasons["incv"] = "The incv stage has not finished in this run, so there is no estimate of the noise."
    if not list((run_dir / "rounds").glob("*/selection.parquet")):
        reasons["rounds"] = "No round of INCV has finished in this run, so nothing has been selected."
    if not (run_dir / "evaluation.json").exists():
        reasons["evaluation"] = "The evaluate stage has not finished in this run, so there is no accuracy."
    return reasons


def strict(value: Any) -> Any:
    """The value as strict JSON: no nan or inf, no NumPy types, string keys; anything else as its text."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [strict(item) for item in value]
    if isinstance(value, np.generic):
        return strict(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _class_names(manifest: dict[str, Any]) -> list[str]:
    return [str(name) for name in (manifest.get("dataset") or {}).get("class_names") or []]


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None
