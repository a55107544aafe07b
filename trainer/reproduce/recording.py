"""Turns a finished run directory into records for results/runs/."""

import json
import re
import shlex
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from shards.durable import read_json, write_bytes
from shards.errors import ConfigError, InputError
from shards.image_check import decode_rgb
from shards.sample_index import SampleIndex
from trainer.loading.shard_reader import ShardReader
from trainer.records.manifest import INCV_FROM, Manifest
from trainer.records.run_directory import RunDirectory
from trainer.report.suspects import thumbnails
from trainer.reproduce.matching import Identity, find_differences
from trainer.reproduce.records import RunRecord, parse_record
from trainer.run.result_keys import hash_keys
from trainer.run.start_checks import code_hash

_ROUND = ("round", "selected", "candidates", "removed", "agreement", "label_precision", "label_recall", "theory")
_BEFORE_METHODS = ("pack", "labels")
_AFTER_METHODS = ("evaluate", "export", "report")
_SUSPECTS = 8


def build_records(root: Path, command: str | None = None) -> list[dict[str, Any]]:
    """Return one record for each method of a finished run, or one of `incv` for a run without methods.

    command: that executes the run alone; None: the one of its last start. Raises ConfigError if it has not finished.
    """
    run = RunDirectory(root)
    if not run.manifest.exists():
        raise ConfigError(f"{root} is not a run directory: it has no manifest.json")
    manifest, config = Manifest(run).content, yaml.safe_load(run.config.read_text())
    unfinished = [stage for stage, entry in manifest["stages"].items() if entry["state"] != "done"]
    last = manifest["starts"][-1]
    if last["ended"] != "finished" or unfinished or not run.report_json.exists():
        where = f" in {', '.join(unfinished)}" if unfinished else ""
        raise ConfigError(f"{root} has not finished{where}: run its command again, then record it")
    report = read_json(run.report_json)
    stages = list(config["methods"]) or ["incv"]
    return [_build_record(run, manifest, config, report, stage, command) for stage in stages]


def _build_record(
    run: RunDirectory,
    manifest: dict[str, Any],
    config: dict[str, Any],
    report: dict[str, Any],
    stage: str,
    command: Any,
) -> dict[str, Any]:
    entries, last = manifest["stages"], manifest["starts"][-1]
    keys = entries[stage]["keys"]  # with those of the stages that it builds on
    trains = [name for name in ("incv", *config["methods"]) if name in entries]
    trained = [name for name in trains if name == stage or any(key.startswith(f"{name}.") for key in keys)]
    reads_incv = "incv" in trained
    around = [*_BEFORE_METHODS, *trained, *_AFTER_METHODS]
    seconds = {name: entries[name]["seconds"] for name in around if name in entries}
    if "incv" in seconds:  # if another run has executed it, the time it took there
        seconds["incv"] += (manifest.get(INCV_FROM) or {}).get("seconds", 0.0)
    noise = {name: value for name, value in report["noise"].items() if name != "stated"}
    accuracy = {name: {stage: each[stage]} for name, each in (report["accuracy"] or {}).items() if stage in each}
    record: dict[str, Any] = {
        "recipe": manifest["recipe"],
        "method": stage,
        "seed": config["seed"],
        "command": command or _command_of(last),
        "commit": find_commit(last.get("code")),
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
        "accuracy_per_epoch": read_accuracy_per_epoch(run, stage),
        "keys": keys,
        "numerics": {name: entries[name].get("numerics", 1) for name in trained},
    }
    if reads_incv:
        matrices = ("prior", "transition", "confident", "predicted")
        record["selection"] = report["selection"]
        record["confusion"] = {name: report["confusion"].get(name) for name in matrices}
    if stage == "incv":
        record["suspects"] = _read_suspects(report, Path(config["data"]["train"]["shards"]))
    training = run.method(stage) / "training.json"
    return record | ({"training": read_json(training)} if training.exists() else {})


def _read_suspects(report: dict[str, Any], shards: Path) -> list[dict[str, Any]]:
    """Return the most suspicious labels by the names of their classes, with their images if they can be read."""
    suspects, names = (report["suspicious"] or [])[:_SUSPECTS], report["class_names"]
    images: dict[int, dict[str, Any]] = {}
    with suppress(InputError), closing(ShardReader(SampleIndex.load(shards))) as reader:  # maybe on another machine
        images = thumbnails(suspects, lambda number: Image.fromarray(decode_rgb(reader.read(number))))
    return [_name_suspect(each, names, images.get(each["sample_id"], {}).get("uri")) for each in suspects]


def _name_suspect(suspect: dict[str, Any], names: list[str], image: str | None) -> dict[str, Any]:
    classes = {key: names[suspect[key]] for key in ("given", "predicted")}
    return {"sample_id": suspect["sample_id"], **classes, "loss": suspect["loss"], "image": image}


def _command_of(start: dict[str, Any]) -> str:
    """Return the command of a start, with the program as a user would call it."""
    words = shlex.split(start["command"])
    return shlex.join(["incv", *words[1:]])


def read_accuracy_per_epoch(run: RunDirectory, method: str) -> dict[str, list[float]]:
    """Return the accuracies in a method's metrics.jsonl by evaluation set, in percent."""
    path = run.method(method) / "metrics.jsonl"
    found: dict[str, list[float]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        for key, value in json.loads(text).items():
            if key.startswith("accuracy."):
                found.setdefault(key.removeprefix("accuracy."), []).append(round(100 * value, 4))
    return found


def find_commit(code: str | None) -> str | None:
    """Return the commit of this checkout if it has exactly the code that a run recorded; otherwise None."""
    repository = Path(__file__).parents[2]
    if code != code_hash():
        return None
    try:
        answers = [
            subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True, timeout=30, check=True)
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "trainer", "shards", "recipes"])
        ]
    except (OSError, subprocess.SubprocessError):  # no git, or not a checkout
        return None
    return answers[0].stdout.strip() if not answers[1].stdout.strip() else None


def write_record(folder: Path, record: dict[str, Any], name: str | None = None, replace: bool = False) -> Path:
    """Write a record as NAME.json; a hash is appended if that file has other result keys.

    name: None: <recipe>-<method>-seed<seed>. Raises ConfigError if the same run is recorded with other numbers,
    unless `replace`.
    """
    name = name or f"{record['recipe']}-{record['method']}-seed{record['seed']}"
    path = folder / f"{name}.json"
    if path.exists() and not _is_same(read_record(path), record):
        path = folder / f"{name}-{hash_keys({'keys': record['keys'], 'numerics': record['numerics']})[:8]}.json"
    if path.exists() and not replace and read_record(path).accuracy != parse_record(record, path).accuracy:
        raise ConfigError(f"{path} records this run with other numbers: remove it, or add --replace")
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(path, format_record(record).encode())
    return path


def format_record(record: dict[str, Any]) -> str:
    """Return a record as JSON, with lists of numbers on one line."""

    def join(found: re.Match[str]) -> str:
        return f"[{' '.join(found[1].split())}]"

    return re.sub(r"\[([-+.eE\d,\s]*)\]", join, json.dumps(record, indent=1, ensure_ascii=False)) + "\n"


def read_record(path: Path) -> RunRecord:
    return parse_record(read_json(path), path)


def _is_same(before: RunRecord, record: dict[str, Any]) -> bool:
    if before.keys is None:
        return False
    versions = Identity(before.keys, before.numerics), Identity(record["keys"], record["numerics"])
    return not find_differences(*versions)
