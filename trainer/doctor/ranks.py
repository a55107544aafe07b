"""Reads the record of a run: the state of each rank from manifest and heartbeats, and the progress that is saved."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shards.errors import ConfigError
from trainer.distributed.place import show_place
from trainer.records.heartbeat import WAITING
from trainer.records.run_directory import RunDirectory

NO_DURABLE_POINT = "no durable point yet"
SILENT_AFTER = 60.0
"""Seconds without a heartbeat after which a rank counts as dead; a live rank writes one every few seconds."""
_STALLED_AFTER = 60.0  # seconds without a new step after which a rank counts as stalled
_STALLED_UNCOUNTED_AFTER = 600.0  # the same for work without steps, such as writing a report or checking shards
_CLOCK_SKEW = 2.0  # seconds that the clocks of the nodes may differ, including rounding

_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("rank", "size", "pid", "step", "total"), int),
    **dict.fromkeys(("host", "launcher", "where"), str),
    **dict.fromkeys(("moved", "written"), (int, float)),
}


@dataclass(frozen=True)
class Rank:
    """One rank of the last start."""

    number: int
    state: str
    """moving, stalled, waiting, silent, unseen or starting; or, if it has ended, finished, stopped or failed."""
    where: str = ""
    step: int = 0
    total: int = 0
    moved: float = 0.0
    """Unix time at which it reached this step."""
    written: float = 0.0
    """Unix time of its last heartbeat."""
    host: str = ""
    pid: int = 0

    @property
    def place(self) -> str:
        """The position, to be used in a sentence."""
        return f"{self.where} at step {self.step:,} of {self.total:,}" if self.total else self.where

    @property
    def alive(self) -> bool:
        return self.state in ("moving", "stalled", "waiting", "starting")


@dataclass(frozen=True)
class ObservedRun:
    """A run as recorded in its directory."""

    root: Path
    recipe: str | None
    stages: dict[str, Any]
    starts: int
    began: float | None
    """Unix time of the last start."""
    ended: str | None
    """How the last start ended: finished, stopped or failed; None if it is running or was killed."""
    stopped: dict[str, Any] | None
    """Content of stopped.json."""
    launcher: str
    ranks: list[Rank]

    @property
    def stages_done(self) -> list[str]:
        return [name for name, stage in self.stages.items() if (stage or {}).get("state") == "done"]


def read_run(run: RunDirectory, now: float) -> ObservedRun:
    """Read the record of a run. Raises ConfigError if the folder is not a run directory."""
    heartbeats = {heartbeat["rank"]: heartbeat for heartbeat in _read_heartbeats(run.logs)}
    manifest = _read_object(run.manifest)
    if not heartbeats and not isinstance(manifest.get("starts"), list):
        raise ConfigError(
            f"{run.root} is not a run directory: pass the --run-dir of `incv run` (default: runs/<recipe>)"
        )
    starts = manifest.get("starts") or []
    last = starts[-1] if starts else {}
    began = _parse_time(last.get("time"))
    newest = max(heartbeats.values(), key=lambda heartbeat: float(heartbeat["written"]), default=None)
    size = last.get("world") or (newest["size"] if newest else 1)
    return ObservedRun(
        root=run.root,
        recipe=manifest.get("recipe"),
        stages=manifest.get("stages") or {},
        starts=len(starts),
        began=began,
        ended=last.get("ended"),
        stopped=_read_object(run.stopped) or None,
        launcher=newest["launcher"] if newest else "",
        ranks=[_build_rank(number, heartbeats.get(number), began, now) for number in range(size)],
    )


def _build_rank(number: int, heartbeat: dict[str, Any] | None, began: float | None, now: float) -> Rank:
    state = _find_state(heartbeat, began, now)
    if heartbeat is None or state in ("unseen", "starting"):
        return Rank(number, state)
    names = ("step", "total", "moved", "written", "host", "pid")
    return Rank(number, state, show_place(heartbeat["where"]), **{name: heartbeat[name] for name in names})


def _find_state(heartbeat: dict[str, Any] | None, began: float | None, now: float) -> str:
    is_old = heartbeat is not None and began is not None and heartbeat["written"] < began - _CLOCK_SKEW
    if heartbeat is None or is_old:  # a heartbeat from an earlier start
        return "starting" if began is not None and now - began <= SILENT_AFTER else "unseen"
    if heartbeat["ended"]:
        return str(heartbeat["ended"])
    if now - heartbeat["written"] > SILENT_AFTER:
        return "silent"
    if heartbeat["where"].startswith(WAITING):
        return "waiting"
    stalled_after = _STALLED_AFTER if heartbeat["total"] else _STALLED_UNCOUNTED_AFTER
    return "stalled" if now - heartbeat["moved"] > stalled_after else "moving"


def _read_heartbeats(logs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(logs.glob("heartbeat-rank*.json")):
        heartbeat = _read_object(path)
        if "ended" in heartbeat and all(isinstance(heartbeat.get(name), kind) for name, kind in _TYPES.items()):
            yield heartbeat


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing or damaged, so that damaged runs can be diagnosed too."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _parse_time(time: object) -> float | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(time).timestamp()  # type: ignore[arg-type]
    return None


def describe_durable_point(root: Path) -> str:
    """Return a line that changes if and only if another stage, checkpoint, predict pass or evaluation is saved.

    It contains no times or counts of starts, so it stays the same if a run restarts without progress. Works on any
    folder, even one that does not exist yet.
    """
    run = RunDirectory(root)
    stages = _read_object(run.manifest).get("stages") or {}
    # Packing does not count: every start checks the shards again.
    done = [name for name, stage in stages.items() if name != "pack" and (stage or {}).get("state") == "done"]
    evaluated = _read_object(run.evaluation_progress)
    parts = {
        "done": done,
        "checkpoints": _find_checkpoints(run),
        "predicted": [f.parent.relative_to(root).as_posix() for f in sorted(run.rounds.rglob("predictions.parquet"))],
        "evaluated": sorted(f"{name}/{method}" for name, methods in evaluated.items() for method in methods or ()),
    }
    fields = [f"{name}: {' '.join(values)}" for name, values in parts.items() if values]
    return "; ".join(fields) or NO_DURABLE_POINT


def _find_checkpoints(run: RunDirectory) -> list[str]:
    """Return the newest checkpoint of each training. A checkpoint folder gets its final name once it is complete."""
    newest: dict[str, int] = {}
    for folder in (*run.rounds.rglob("checkpoints/step-*"), *run.methods.rglob("checkpoints/step-*")):
        step = folder.name.removeprefix("step-")
        if step.isdecimal():
            training = folder.parent.parent.relative_to(run.root).as_posix()
            newest[training] = max(newest.get(training, 0), int(step))
    return [f"{training}@{step}" for training, step in sorted(newest.items())]
