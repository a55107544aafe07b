"""Reads run directories and recorded runs into the same records: one for each method of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shards.durable import read_json
from shards.errors import ConfigError, DataError
from trainer.report.metrics_file import read_metrics
from trainer.reproduce.records import RunRecord, parse_record
from trainer.reproduce.run_files import RunFiles, describe_stage, read_run_files
from trainer.reproduce.runs import Identity, identify_record

Columns = Mapping[str, Sequence[float | None]]
_DAMAGE = (KeyError, IndexError, TypeError, AttributeError, ValueError, yaml.YAMLError, OSError)
"""What reading a file whose content has another form than incv writes can raise."""


@dataclass(frozen=True)
class ComparedRun:
    """One method of one run."""

    name: str
    """The path that was given."""
    record: RunRecord
    identity: Identity
    metrics: Columns = field(default_factory=dict)
    """The columns of the method's metrics.jsonl; a recorded run has none."""
    unfinished: tuple[str, ...] = ()
    """Stages of the run that have started and not finished, or `start` for a run that did not end well."""


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read all runs. Raises ConfigError for a path that is no run, and DataError for a damaged one."""
    return [run for path in dict.fromkeys(paths) for run in _read_path(path)]


def _read_path(path: Path) -> list[ComparedRun]:
    if path.is_dir():
        return _read_directory(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or folder; name a run directory or a recorded run")
    try:
        record = parse_record(read_json(path), path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return [ComparedRun(str(path), record, identify_record(record))]


def _read_directory(root: Path) -> list[ComparedRun]:
    if not (root / "manifest.json").exists():
        raise ConfigError(
            f"{root} is not a run directory: it has no manifest.json; name run directories or files of recorded "
            f"runs, as {root}/*"
        )
    try:
        files = read_run_files(root)
        stages = _find_stages(files)
        return [_read_stage(files, root, stage) for stage in stages]
    except _DAMAGE as error:
        raise DataError(
            f"{root} is damaged: its files do not have the content that incv writes "
            f"({type(error).__name__}: {error}); repair it, or leave it out"
        ) from None


def _find_stages(files: RunFiles) -> list[str]:
    """Return the methods that have started; without one, `incv` if that has."""
    entries = files.manifest["stages"]
    found = [name for name in files.config["methods"] if name in entries] or [n for n in ("incv",) if n in entries]
    if not found:
        raise DataError(f"{files.run.root} has no results yet: neither INCV nor a method has started")
    return found


def _read_stage(files: RunFiles, root: Path, stage: str) -> ComparedRun:
    record = parse_record(describe_stage(files, stage), root)
    path = files.run.method(stage) / "metrics.jsonl"
    metrics = read_metrics(path) if path.exists() else {}
    unfinished = () if files.is_finished else files.unfinished or ("report",)
    return ComparedRun(str(root), record, identify_record(record), metrics, unfinished)


def describe_environment(record: RunRecord) -> dict[str, Any]:
    """Return what is no recipe key and may still change results or times."""
    versions = {name: record.versions.get(name) for name in ("incv", "torch", "timm")}
    return {"machine": record.machine, "code": record.commit or record.code, **versions}
