"""Step one of the report: collect the data of a run directory in one mapping, ready for JSON."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from shards.durable import read_json
from shards.errors import ConfigError
from trainer.incv.selection_index import SelectionIndex
from trainer.methods.registry import get_method, method_names, title_of
from trainer.records.manifest import INCV_FROM
from trainer.records.run_directory import RunDirectory
from trainer.report.curves import read_curves
from trainer.report.gaps import ReadableRun, find_gaps
from trainer.report.left_out import read_left_out
from trainer.report.loss_histograms import measure_losses
from trainer.report.measured import (
    MATRIX_CLASSES,
    RunSamples,
    describe_selection,
    last_selection,
    measure_confusion,
    measure_rounds,
    read_samples,
)
from trainer.report.noise_by_group import (
    describe_labels,
    describe_sources,
    estimated_pairs,
    excerpt,
    read_held_out,
)
from trainer.report.profile import read_profile
from trainer.report.signals import confirmed_noise, measure_signals, read_repeated, stated_estimate
from trainer.report.sources import SampleSources
from trainer.report.suspects import count_held_out, find_contradicted_checks, find_suspects
from trainer.report.trust import judge
from trainer.report.unreadable import find_unreadable


@dataclass(frozen=True, eq=False)
class RunFacts:
    """What a run directory says about its samples, read once for the report and its gallery."""

    run: ReadableRun
    selection: SelectionIndex | None
    samples: RunSamples
    manifest: dict[str, Any]

    @classmethod
    def read(cls, root: Path, class_names: Sequence[str] = ()) -> "RunFacts":
        """class_names: used if the manifest has none."""
        run = ReadableRun(root)
        manifest, selection = _optional(run.manifest) or {}, last_selection(run)
        names = _class_names(manifest) or list(class_names)
        return cls(run, selection, read_samples(run, names, selection), manifest)


def collect_report(facts: RunFacts, sources: SampleSources | None = None) -> dict[str, Any]:
    """Return the content of report.json; values are None if the run is unfinished or has no true labels."""
    run, selection, samples, manifest = facts.run, facts.selection, facts.samples, facts.manifest
    config = (yaml.safe_load(run.config.read_text()) or {}) if run.config.exists() else {}
    incv = _optional(run.incv)
    held_out = read_held_out(run, samples)
    joint = None if held_out is None or not len(held_out.ids) else held_out.joint(slice(None), samples.classes)
    repeated = read_repeated(run, samples)
    starts = manifest.get("starts") or []
    noise = (incv or {}).get("noise") or {}
    flagged, suspicious = find_suspects(selection, samples)
    report: dict[str, Any] = {
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
            "confidence_curve": noise.get("confidence_curve"),
            "confirmed": confirmed_noise(run, samples, selection, repeated),
            "true": samples.realised_noise(),
        },
        "rounds": measure_rounds(run, samples, (incv or {}).get("rounds") or []),
        "selection": _describe_selection(selection, samples, joint),
        "by_source": None if selection is None else describe_sources(selection, samples, held_out, sources),
        "losses": measure_losses(selection, samples),
        "filled_classes": (incv or {}).get("filled_classes"),
        "ended_early": (incv or {}).get("ended_early"),
        "confusion": measure_confusion(run, samples, noise.get("transition")) | _estimated_confusion(joint, samples),
        "methods": describe_methods(config.get("methods") or []),
        "accuracy": accuracy(_optional(run.evaluation)),
        "left_out": read_left_out(run),
        "corrections": _corrections(run, selection, samples),
        "chosen_on": (config.get("evaluation") or {}).get("choose_on"),
        "unreadable": find_unreadable(run),
        "held_out": count_held_out(selection, samples),
        "flagged": flagged,
        "suspicious": suspicious,
        "labels_review": run.labels_review_csv.name if run.labels_review_csv.exists() else None,
        "curves": read_curves(run),
        "time_s": stage_times(manifest.get("stages") or {}),
        "incv_from": manifest.get(INCV_FROM),
        "profile": read_profile(run),
        "starts": {
            "count": len(starts),
            "resumed": sum(start.get("resumed_from") is not None for start in starts),
            "list": starts,
        },
        "config": _without_large_matrix(config),
        "missing": missing(run, samples, bool(config.get("methods"))),
        "gaps": find_gaps(run),
    }
    estimate = stated_estimate(report["noise"], (config.get("incv") or {}).get("noise_estimate"))
    report["noise"]["stated"] = estimate[0] if estimate else None
    signals = measure_signals(run, samples, selection, repeated, incv, report)
    report["trust"] = None if signals is None else judge(signals).as_json() | {"signals": asdict(signals)}
    return strict(report)


def _describe_selection(
    selection: SelectionIndex | None, samples: RunSamples, joint: NDArray[np.float64] | None
) -> dict[str, Any] | None:
    described = describe_selection(selection, samples)
    if described is None or selection is None:
        return None
    return described | {"by_label": describe_labels(selection, samples, joint)}


def _estimated_confusion(joint: NDArray[np.float64] | None, samples: RunSamples) -> dict[str, Any]:
    """Return the classes that the labels are estimated to confuse and, of a large matrix, the part that has them."""
    if joint is None:
        return {"estimated_pairs": None, "excerpt": None}
    pairs = estimated_pairs(joint, int(samples.inside.sum()))
    large = samples.classes > MATRIX_CLASSES
    return {"estimated_pairs": pairs, "excerpt": excerpt(joint, pairs) if large else None}


def _without_large_matrix(config: dict[str, Any]) -> dict[str, Any]:
    """Replace a large noise matrix by a short description, because it is unreadable on a page."""
    labels = config.get("labels") or {}
    rows = len(labels.get("matrix") or ())
    if rows <= MATRIX_CLASSES:
        return config
    return config | {"labels": labels | {"matrix": f"{rows} x {rows} numbers, in config.resolved.yaml"}}


def describe_methods(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return title and role of each method from the registry; the title of an unregistered method is its name."""
    described: dict[str, dict[str, Any]] = {}
    for name in names:
        described[name] = {"title": title_of(name), "headline": False, "reference": False}
        with suppress(ConfigError):
            method = get_method(name)
            described[name] |= {"headline": method.is_headline, "reference": method.is_reference}
    return described


def accuracy(evaluation: dict[str, Any] | None) -> dict[str, dict[str, dict[str, Any]]] | None:
    """Convert the counts of evaluation.json to percentages; top1 and top5 are means over a method's networks."""
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
    """Return the seconds of each stage, in the order in which stages run."""
    last = ("evaluate", "export", "report")
    order = {name: place for place, name in enumerate(("pack", "labels", "incv", *method_names(), *last))}
    names = sorted(stages, key=lambda name: order.get(name, len(order)))
    return {name: (stages[name] or {}).get("seconds") for name in names}


def missing(run: RunDirectory, samples: RunSamples, has_methods: bool) -> dict[str, str]:
    """Return one sentence for each empty part of the report that says why it is empty."""
    reasons = {}
    if samples.truth is None:
        reasons["truth"] = (
            "The true labels of this data set are unknown, so precision, recall and the true noise ratio "
            "cannot be measured."
        )
    if not run.incv.exists():
        reasons["incv"] = "The incv stage has not finished in this run, so there is no noise estimate."
    if not run.round_files("selection.parquet"):
        reasons["rounds"] = "No round of INCV has finished in this run, so nothing has been selected."
    if has_methods and not run.evaluation.exists():
        reasons["evaluation"] = "The evaluate stage has not finished in this run, so there is no accuracy."
    return reasons


def strict(value: Any) -> Any:
    """Convert to strict JSON: NaN and infinity become None, NumPy scalars numbers, keys and other types strings."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [strict(item) for item in value]
    if isinstance(value, np.generic):
        return strict(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _corrections(run: RunDirectory, selection: SelectionIndex | None, samples: RunSamples) -> dict[str, Any] | None:
    """Return what `labels.corrections` did, and which of the checked labels are worth a second look."""
    counts = _optional(run.corrections)
    if counts is None:
        return None
    contradicted, shown = find_contradicted_checks(selection, samples)
    return counts | {"contradicted": contradicted, "second_look": shown}


def _class_names(manifest: dict[str, Any]) -> list[str]:
    return [str(name) for name in (manifest.get("dataset") or {}).get("class_names") or []]


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None
