"""Turns a finished run directory into records for results/runs/."""

import json
import re
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from PIL import Image

from shards.durable import write_bytes
from shards.errors import ConfigError, InputError
from shards.image_check import decode_rgb
from shards.sample_index import SampleIndex
from trainer.loading.shard_reader import ShardReader
from trainer.report.pictures import thumbnails
from trainer.reproduce.records import RunRecord, parse_record, read_record
from trainer.reproduce.run_files import describe_stage, read_run_files
from trainer.reproduce.runs import Identity, find_differences
from trainer.run.result_keys import hash_keys
from trainer.run.start_checks import code_hash

_SUSPECTS = 8


def build_records(root: Path, command: str | None = None) -> list[dict[str, Any]]:
    """Return one record for each method of a finished run, or one of `incv` for a run without methods.

    command: that executes the run alone; None: the one of its last start. Raises ConfigError if it has not finished.
    """
    files = read_run_files(root)
    if not files.is_finished:
        where = f" in {', '.join(files.unfinished)}" if files.unfinished else ""
        raise ConfigError(f"{root} has not finished{where}: run its command again, then record it")
    commit = find_commit(files.manifest["starts"][-1].get("code"))
    records = []
    for stage in list(files.config["methods"]) or ["incv"]:
        record = describe_stage(files, stage, command, commit)
        if stage == "incv":
            record["suspects"] = _read_suspects(files.report, Path(files.config["data"]["train"]["shards"]))
        records.append(record)
    return records


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
    if path.exists() and not is_recorded(folder, record, name):
        path = folder / f"{name}-{hash_keys({'keys': record['keys'], 'numerics': record['numerics']})[:8]}.json"
    if path.exists() and not replace and read_record(path).accuracy != parse_record(record, path).accuracy:
        raise ConfigError(f"{path} records this run with other numbers: remove it, or add --replace")
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(path, format_record(record).encode())
    return path


def is_recorded(folder: Path, record: dict[str, Any], name: str) -> bool:
    """Whether NAME.json records the same run, that is, one with the same result keys and numerics versions."""
    path = folder / f"{name}.json"
    return path.exists() and _is_same(read_record(path), record)


def format_record(record: dict[str, Any]) -> str:
    """Return a record as JSON, with lists of numbers on one line."""

    def join(found: re.Match[str]) -> str:
        return f"[{' '.join(found[1].split())}]"

    return re.sub(r"\[([-+.eE\d,\s]*)\]", join, json.dumps(record, indent=1, ensure_ascii=False)) + "\n"


def _is_same(before: RunRecord, record: dict[str, Any]) -> bool:
    versions = Identity(before.keys, before.numerics), Identity(record["keys"], record["numerics"])
    return not find_differences(*versions)
