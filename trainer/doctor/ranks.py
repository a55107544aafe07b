"""Reads the manifest and the heartbeat files of a run, and derives the state of each rank."""

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

SILENT_AFTER = 60.0
"""Seconds without a heartbeat after which a rank counts as dead; a live rank writes one every few seconds."""
_STALLED_AFTER = 60.0  # seconds without a new step after which a rank counts as stalled
_STALLED_UNCOUNTED_AFTER = 600.0  # the same for work without steps, such as writing a report or checking shards
_CLOCK_SKEW = 2.0  # seconds that the clocks of the nodes may differ, including rounding

_TYPES = {"rank": int, "size": int, "host": str, "pid": int, "launcher": str, "where": str, "step": int, "total": int}


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


def read_run(run: RunDirectory, now: float) -> ObservedRun:
    """Read the record of a run. Raises ConfigError if the folder is not a run directory."""
    heartbeats = {heartbeat["rank"]: heartbeat for heartbeat in _read_heartbeats(run.logs)}
    manifest = read_mapping(run.manifest)
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
        stopped=read_mapping(run.stopped) or None,
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
    if heartbeat is None or (
        began is not None and heartbeat["written"] < began - _CLOCK_SKEW
    ):  # from an earlier start
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
        heartbeat = read_mapping(path)
        numbers = all(isinstance(heartbeat.get(name), (int, float)) for name in ("moved", "written"))
        if (
            numbers
            and "ended" in heartbeat
            and all(isinstance(heartbeat.get(name), kind) for name, kind in _TYPES.items())
        ):
            yield heartbeat


def read_mapping(path: Path) -> dict[str, Any]:
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
