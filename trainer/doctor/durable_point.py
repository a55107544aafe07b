"""Describes the durable progress of a run in one line, to be compared with an earlier line."""

from pathlib import Path

from trainer.doctor.ranks import read_mapping
from trainer.records.run_directory import RunDirectory

NO_DURABLE_POINT = "no durable point yet"


def describe_durable_point(root: Path) -> str:
    """Return a line that changes if and only if another stage, checkpoint, predict pass or evaluation is saved.

    It contains no times or counts of starts, so it stays the same if a run restarts without progress. Works on any
    folder, even one that does not exist yet.
    """
    run = RunDirectory(root)
    stages = read_mapping(run.manifest).get("stages") or {}
    # Packing does not count: every start checks the shards again.
    done = [name for name, stage in stages.items() if name != "pack" and (stage or {}).get("state") == "done"]
    parts = {
        "done": done,
        "checkpoints": _find_checkpoints(run),
        "predicted": [_relative_name(file.parent, root) for file in sorted(run.rounds.rglob("predictions.parquet"))],
        "evaluated": _find_evaluations(run),
    }
    fields = [f"{name}: {' '.join(values)}" for name, values in parts.items() if values]
    return "; ".join(fields) or NO_DURABLE_POINT


def _find_checkpoints(run: RunDirectory) -> list[str]:
    """Return the newest checkpoint of each training. A checkpoint folder gets its final name once it is complete."""
    newest: dict[str, int] = {}
    for top in (run.rounds, run.methods):
        for folder in top.rglob("checkpoints/step-*"):
            step = folder.name.removeprefix("step-")
            if step.isdecimal():
                training = _relative_name(folder.parent.parent, run.root)
                newest[training] = max(newest.get(training, 0), int(step))
    return [f"{training}@{step}" for training, step in sorted(newest.items())]


def _find_evaluations(run: RunDirectory) -> list[str]:
    passes = read_mapping(run.evaluation_progress)
    return sorted(f"{name}/{method}" for name, methods in passes.items() for method in methods or ())


def _relative_name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()
