"""What each rank's heartbeat file says, held against the clock and the run's last start."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shards.errors import ConfigError
from trainer.records.heartbeat import WAITING
from trainer.records.run_directory import RunDirectory

SILENT_AFTER = 60.0
"""Seconds without a beat after which a rank counts as dead; it beats every few seconds, whatever else it does."""
_STILL_AFTER = 60.0  # seconds at one step after which a rank counts as standing
_STILL_UNCOUNTED_AFTER = 600.0  # where no steps are counted: writing a report, checking shards
_CLOCKS_DIFFER = 2.0  # seconds between the machines of a run, and by which times are rounded

_TYPES = {"rank": int, "size": int, "host": str, "pid": int, "launcher": str, "where": str, "step": int, "total": int}


@dataclass(frozen=True)
class Rank:
    """One rank of the last start."""

    number: int
    state: str
    """moving, still, waiting, silent, unseen, starting; finished, stopped, failed."""
    where: str = ""
    step: int = 0
    total: int = 0
    moved: float = 0.0
    """Unix time at which it came to this place."""
    written: float = 0.0
    """Unix time of its last sign of life."""
    host: str = ""
    pid: int = 0

    @property
    def place(self) -> str:
        """Words for a sentence."""
        return f"{self.where} at step {self.step:,} of {self.total:,}" if self.total else self.where

    @property
    def alive(self) -> bool:
        return self.state in ("moving", "still", "waiting", "starting")


@dataclass(frozen=True)
class RunRecord:
    """What the run directory says of the run as a whole."""

    root: Path
    recipe: str | None
    stages: dict[str, Any]
    starts: int
    began: float | None
    """Unix time of the last start."""
    ended: str | None
    """How the last start ended: finished, stopped, failed; None while it runs, or where it was killed."""
    stopped: dict[str, Any] | None
    """stopped.json."""
    launcher: str
    ranks: list[Rank]


def read_run(run: RunDirectory, now: float) -> RunRecord:
    """Raises ConfigError where the folder is not a run directory."""
    beats = {beat["rank"]: beat for beat in _heartbeats(run.logs)}
    manifest = read_mapping(run.manifest)
    if not beats and not isinstance(manifest.get("starts"), list):
        raise ConfigError(
            f"{run.root} is not a run directory: give the --run-dir of `incv run` (default: runs/<recipe>)"
        )
    starts = manifest.get("starts") or []
    last = starts[-1] if starts else {}
    began = _unix(last.get("time"))
    newest = max(beats.values(), key=lambda beat: float(beat["written"]), default=None)
    size = last.get("world") or (newest["size"] if newest else 1)
    return RunRecord(
        root=run.root,
        recipe=manifest.get("recipe"),
        stages=manifest.get("stages") or {},
        starts=len(starts),
        began=began,
        ended=last.get("ended"),
        stopped=read_mapping(run.stopped) or None,
        launcher=newest["launcher"] if newest else "",
        ranks=[_rank(number, beats.get(number), began, now) for number in range(size)],
    )


def _rank(number: int, beat: dict[str, Any] | None, began: float | None, now: float) -> Rank:
    state = _state(beat, began, now)
    if beat is None or state in ("unseen", "starting"):
        return Rank(number, state)
    names = ("where", "step", "total", "moved", "written", "host", "pid")
    return Rank(number, state, **{name: beat[name] for name in names})


def _state(beat: dict[str, Any] | None, began: float | None, now: float) -> str:
    if beat is None or (began is not None and beat["written"] < began - _CLOCKS_DIFFER):  # of an earlier start
        return "starting" if began is not None and now - began <= SILENT_AFTER else "unseen"
    if beat["ended"]:
        return str(beat["ended"])
    if now - beat["written"] > SILENT_AFTER:
        return "silent"
    if beat["where"].startswith(WAITING):
        return "waiting"
    still_after = _STILL_AFTER if beat["total"] else _STILL_UNCOUNTED_AFTER
    return "still" if now - beat["moved"] > still_after else "moving"


def _heartbeats(logs: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(logs.glob("heartbeat-rank*.json")):
        beat = read_mapping(path)
        numbers = all(isinstance(beat.get(name), (int, float)) for name in ("moved", "written"))
        if numbers and "ended" in beat and all(isinstance(beat.get(name), kind) for name, kind in _TYPES.items()):
            yield beat


def read_mapping(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none, since a doctor reads what is left of a run."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _unix(time: object) -> float | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(time).timestamp()  # type: ignore[arg-type]
    return None
