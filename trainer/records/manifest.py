"""manifest.json: every start of a run, where it resumed, the steps it executed, and the state of each stage."""

import logging
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.durable import disk_errors, is_temporary, read_json, write_bytes, write_json
from trainer.records.run_directory import RunDirectory

_log = logging.getLogger(__name__)

if TYPE_CHECKING:  # slow, because it imports torch; not needed to read a manifest
    from trainer.distributed.world import World

INCV_FROM = "incv_from"
"""Key of the note on the run whose INCV stage this run takes over (`--incv-from`)."""
_PACKAGES = ("incv", "torch", "torchvision", "timm", "numpy", "pyarrow", "pillow")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest:
    """The content of manifest.json. `save` returns only once the file is durable."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.content: dict[str, Any] = {"recipe": None, "dataset": None, "stages": {}, "starts": []}
        if run.manifest.exists():
            self.content = read_json(run.manifest)

    @property
    def stages(self) -> dict[str, Any]:
        stages: dict[str, Any] = self.content["stages"]
        return stages

    def set_stage(self, stage: str, record: Mapping[str, Any], order: Sequence[str]) -> None:
        """Record the state of a stage. order: of all stages, which the entries keep."""
        entries = {**self.stages, stage: record}
        names = [*(name for name in order if name in entries), *(name for name in entries if name not in order)]
        self.content["stages"] = {name: entries[name] for name in names}

    @property
    def start(self) -> dict[str, Any]:
        start: dict[str, Any] = self.content["starts"][-1]
        return start

    def save(self) -> None:
        write_json(self._run.manifest, self.content)

    def begin(
        self,
        recipe: str,
        world: "World",
        batchnorm_rows: Mapping[str, int],
        code: str,
        command: str | None = None,
    ) -> "StartLog":
        """Record this start, after adding the logs of earlier starts, which may have been killed.

        code: hash of the source code; command: that executes this run alone, None: the one that was typed.
        """
        from trainer.distributed.devices import describe_hardware  # deferred: it imports torch

        for number, earlier in enumerate(self.content["starts"]):
            earlier.update(self._start_log(number).read())
        self.content["recipe"] = recipe
        start = {
            "time": now(),
            "command": command or shlex.join(sys.argv),
            "versions": installed_versions(_PACKAGES),
            "code": code,
            "machine": platform.machine(),
            "hardware": describe_hardware(world.device, world.size),
            "launcher": world.launcher,
            "device": str(world.device),
            "threads": world.threads,
            "world": world.size,
            "batchnorm_rows": dict(batchnorm_rows),
            "resumed_from": None,
            "resumed": {},
            "steps_executed": {},
            "ended": None,
        }
        self._warn_if_changed(start)
        self.content["starts"].append(start)
        self.save()
        return self._start_log(len(self.content["starts"]) - 1)

    def _warn_if_changed(self, start: dict[str, Any]) -> None:
        """Warn if the code or a package has changed since the last start, because results may then differ."""
        if not self.content["starts"]:
            return
        before = self.content["starts"][-1]
        names = sorted(before["versions"].keys() | start["versions"].keys())
        changes = [
            f"{name} {before['versions'].get(name)} -> {start['versions'].get(name)}"
            for name in names
            if before["versions"].get(name) != start["versions"].get(name)
        ]
        if before.get("code", start["code"]) != start["code"]:
            changes.append("incv's own code")
        if changes:
            _log.warning("changed since the last start of this run: %s", "; ".join(changes))

    def end(self, how: str) -> None:
        self.start["ended"] = how
        if how == "finished":
            self.content["redo"] = None
        self.start.update(self._start_log(len(self.content["starts"]) - 1).read())
        self.save()

    def _start_log(self, start: int) -> "StartLog":
        return StartLog(self._run, start)


class StartLog:
    """Executed steps and resume points of one start, in one file per training: several ranks may write at once."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self.number = number
        self._folder = run.logs / f"start-{number:04d}"

    def record_steps(self, training: str, steps: int) -> None:
        """Record how many steps of one training (`incv/0/1`, `standard`) this start has executed."""
        write_bytes(self._make_folder("steps") / training.replace("/", "."), b"%d" % steps)

    def record_resume(self, stage: str, round_: int | None, fold: int | None, step: int) -> None:
        """Record that this start resumes a training or stage at `step`."""
        name = stage if round_ is None else f"{stage}.{round_}.{fold}"
        point = {"stage": stage, "round": round_, "fold": fold, "step": step}
        file = self._make_folder("resumed") / name
        if not file.exists():
            write_json(file, {"at": time.time_ns(), "point": point})

    def _make_folder(self, kind: str) -> Path:
        folder = self._folder / kind
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def read(self) -> dict[str, Any]:
        """Return manifest entries: executed steps and resume points by training, and the first resume point."""
        steps = {file.name.replace(".", "/"): int(file.read_text()) for file in self._files("steps")}
        notes = {file.name.replace(".", "/"): read_json(file) for file in self._files("resumed")}
        first = min(notes.values(), key=lambda note: note["at"])["point"] if notes else None
        resumed = {training: note["point"]["step"] for training, note in notes.items()}
        return {"steps_executed": steps, "resumed_from": first, "resumed": resumed}

    def _files(self, kind: str) -> list[Path]:
        folder = self._folder / kind
        return sorted(file for file in folder.iterdir() if not is_temporary(file)) if folder.exists() else []


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of those `packages` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
