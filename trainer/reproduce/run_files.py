"""Reads what a record says of a run from the files of its directory, finished or not; does not import torch."""

import json
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from shards.durable import read_json
from shards.errors import ConfigError, DataError
from trainer.records.manifest import INCV_FROM, Manifest
from trainer.records.run_directory import RunDirectory
from trainer.report.collect import collect_report
from trainer.report.run import ReportRun

_ROUND = ("round", "selected", "candidates", "removed", "agreement", "label_precision", "label_recall", "theory")
_ACCURACY = "accuracy."
"""Prefix of metrics of evaluations; the name of the evaluation set follows."""
_D2L_METRICS = ("lid", "alpha")
"""What D2L reports after each epoch: alpha is below 1 from its turning point on."""


@dataclass
class RunFiles:
    """The contents of the files that describe a run."""

    run: RunDirectory
    manifest: dict[str, Any]
    config: dict[str, Any]
    unfinished: tuple[str, ...]
    """Stages that have started and not finished."""
    is_finished: bool

    @cached_property
    def report(self) -> dict[str, Any]:
        """The content of report.json; of an unfinished run, what is known so far."""
        if not self.is_finished:
            return collect_report(ReportRun(self.run))
        content: dict[str, Any] = read_json(self.run.report_json)
        return content


def read_run_files(root: Path) -> RunFiles:
    """Raises ConfigError if `root` is not a run directory, and DataError if its files are damaged."""
    run = RunDirectory(root)
    if not run.manifest.exists():
        raise ConfigError(f"{root} is not a run directory: it has no manifest.json")
    manifest = Manifest(run).content
    if not run.has_manifest():
        raise DataError(f"{run.manifest} is damaged: it lacks the recipe, the stages or the starts of a run")
    config = _read_config(run.config)
    unfinished = tuple(stage for stage, entry in manifest["stages"].items() if entry["state"] != "done")
    ended = manifest["starts"][-1]["ended"] if manifest["starts"] else None
    is_finished = ended == "finished" and not unfinished and run.report_json.exists()
    return RunFiles(run, manifest, config, unfinished, is_finished)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the run directory is incomplete") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"{path} is damaged: it is not a resolved recipe")
    return config


def describe_stage(
    files: RunFiles, stage: str, command: str | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Return the record of one stage of a run: a method, or `incv`. commit: of the code of its last start."""
    manifest, config, report = files.manifest, files.config, files.report
    entries, last = manifest["stages"], manifest["starts"][-1]
    keys = entries[stage]["keys"]  # with those of the stages that it builds on
    trains = [name for name, entry in entries.items() if "numerics" in entry]
    trained = [name for name in trains if name == stage or any(key.startswith(f"{name}.") for key in keys)]
    reads_incv = "incv" in trained
    seconds = {name: entry["seconds"] for name, entry in entries.items() if name in trained or name not in trains}
    if seconds.get("incv") is not None:  # if another run has executed it, the time it took there
        seconds["incv"] += (manifest.get(INCV_FROM) or {}).get("seconds", 0.0)
    noise = {name: value for name, value in report["noise"].items() if name != "stated"}
    curves = _read_epoch_metrics(files.run, stage)
    accuracy = {name: {stage: each[stage]} for name, each in (report["accuracy"] or {}).items() if stage in each}
    record: dict[str, Any] = {
        "recipe": manifest["recipe"],
        "method": stage,
        "seed": config["seed"],
        "command": command or _command_of(last),
        "commit": commit,
        "code": last.get("code"),
        "machine": last.get("hardware") or f"{last['device']}, {last['machine']}",
        "date": last["time"][:10],
        "precision": config["precision"],
        "versions": last["versions"],
        "starts": len(manifest["starts"]),
        "minutes": round(sum(each or 0.0 for each in seconds.values()) / 60, 1),
        "stage_seconds": seconds,
        "noise": noise if reads_incv else {"true": noise["true"]},
        "rounds": [{key: each.get(key) for key in _ROUND} for each in report["rounds"]] if reads_incv else [],
        "accuracy": accuracy,
        "accuracy_per_epoch": _to_percent(curves),
        "keys": keys,
        "numerics": {name: entries[name]["numerics"] for name in trained},
    }
    if reads_incv:
        matrices = ("prior", "transition", "confident", "predicted")
        record["selection"] = report["selection"]
        record["confusion"] = {name: report["confusion"].get(name) for name in matrices}
    if measured := {name: curves[name] for name in _D2L_METRICS if name in curves}:
        record["metrics_per_epoch"] = measured
    training = files.run.method(stage) / "training.json"
    return record | ({"training": read_json(training)} if training.exists() else {})


def _command_of(start: dict[str, Any]) -> str:
    """Return the command of a start, with the program as a user would call it."""
    words = shlex.split(start["command"])
    return shlex.join(["incv", *words[1:]])


def _read_epoch_metrics(run: RunDirectory, method: str) -> dict[str, list[float]]:
    """Return the metrics that are reported at the end of epochs, from a method's metrics.jsonl, by name."""
    path = run.method(method) / "metrics.jsonl"
    found: dict[str, list[float]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break  # the last line of a killed run, or of one that is writing it
        for key, value in line.items():
            if key.startswith(_ACCURACY) or key in _D2L_METRICS:
                found.setdefault(key, []).append(value)
    return found


def _to_percent(curves: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the accuracies among the metrics by evaluation set, in percent."""
    return {
        name.removeprefix(_ACCURACY): [round(100 * value, 4) for value in curve]
        for name, curve in curves.items()
        if name.startswith(_ACCURACY)
    }
