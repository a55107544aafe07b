"""How far a run has durably come, as one line to compare with an earlier one."""

from pathlib import Path

from trainer.config.schema import STAGES
from trainer.doctor.ranks import read_mapping
from trainer.records.run_directory import RunDirectory

NO_DURABLE_POINT = "no durable point yet"


def describe_durable_point(root: Path) -> str:
    """Two calls answer alike unless a stage, a checkpoint, a predict pass or an evaluation became durable between.

    Times, starts and attempts are not in it: a run that is restarted again and again without getting on answers
    the same. Any folder will do, also one that is not there yet.
    """
    run = RunDirectory(root)
    stages = read_mapping(run.manifest).get("stages") or {}
    # Packing belongs to the shards: it is checked again by every start.
    done = [stage for stage in STAGES if stage != "pack" and (stages.get(stage) or {}).get("state") == "done"]
    parts = {
        "done": done,
        "checkpoints": _checkpoints(run),
        "predicted": [_name(file.parent, root) for file in sorted(run.rounds.rglob("predictions.parquet"))],
        "evaluated": _evaluated(run),
    }
    said = [f"{name}: {' '.join(values)}" for name, values in parts.items() if values]
    return "; ".join(said) or NO_DURABLE_POINT


def _checkpoints(run: RunDirectory) -> list[str]:
    """The newest of each training. A folder has its name only once it is whole."""
    newest: dict[str, int] = {}
    for top in (run.rounds, run.methods):
        for folder in top.rglob("checkpoints/step-*"):
            step = folder.name.removeprefix("step-")
            if step.isdecimal():
                training = _name(folder.parent.parent, run.root)
                newest[training] = max(newest.get(training, 0), int(step))
    return [f"{training}@{step}" for training, step in sorted(newest.items())]


def _evaluated(run: RunDirectory) -> list[str]:
    passes = read_mapping(run.evaluation_progress)
    return sorted(f"{name}/{method}" for name, methods in passes.items() for method in methods or ())


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()
