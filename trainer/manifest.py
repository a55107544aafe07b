"""manifest.json: every start of a run, what it resumed from, how many steps it executed, which stages are done."""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shards.durable import disk_errors, read_json, write_json
from trainer.run_directory import RunDirectory

if TYPE_CHECKING:  # world imports torch, which commands that only read a manifest need not wait for
    from trainer.world import World

_PACKAGES = ("incv", "torch", "torchvision", "timm", "numpy", "pyarrow", "pillow")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Manifest:
    """The record of a run; each change is durable before the call returns."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.content: dict[str, Any] = {"recipe": None, "dataset": None, "stages": {}, "starts": []}
        if run.manifest.exists():
            self.content = read_json(run.manifest)

    @property
    def stages(self) -> dict[str, Any]:
        stages: dict[str, Any] = self.content["stages"]
        return stages

    @property
    def start(self) -> dict[str, Any]:
        start: dict[str, Any] = self.content["starts"][-1]
        return start

    def save(self) -> None:
        write_json(self._run.manifest, self.content)

    def begin(self, recipe: str, world: "World", batchnorm_rows: int) -> None:
        """Record this start; steps of starts that were killed are counted from their counters first."""
        for number, earlier in enumerate(self.content["starts"]):
            earlier["steps_executed"] = self._counted(number)
        self.content["recipe"] = recipe
        self.content["starts"].append(
            {
                "time": now(),
                "command": " ".join(sys.argv),
                "versions": installed_versions(_PACKAGES),
                "machine": platform.machine(),
                "device": str(world.device),
                "threads": world.threads,
                "world": world.size,
                "batchnorm_rows": batchnorm_rows,
                "resumed_from": None,
                "steps_executed": {},
                "ended": None,
            }
        )
        self.save()

    def end(self, how: str) -> None:
        self.start["ended"] = how
        if how == "finished":
            self.content["redo"] = None
        self.start["steps_executed"] = self._counted(len(self.content["starts"]) - 1)
        self.save()

    def resumed(self, stage: str, round_: int | None, fold: int | None, step: int) -> None:
        """Remember the first thing this start resumed."""
        if self.start["resumed_from"] is None:
            self.start["resumed_from"] = {"stage": stage, "round": round_, "fold": fold, "step": step}
            self.save()

    def counter(self, training: str) -> "StepCounter":
        """Counts the executed steps of one training (`incv/0/1`, `standard`) in this start."""
        folder = self._counters(len(self.content["starts"]) - 1)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return StepCounter(folder / training.replace("/", "."))

    def _counters(self, start: int) -> Path:
        return self._run.logs / f"start-{start:04d}"

    def _counted(self, start: int) -> dict[str, int]:
        folder = self._counters(start)
        if not folder.exists():
            return {}
        return {file.name.replace(".", "/"): int(file.read_text() or 0) for file in sorted(folder.iterdir())}


class StepCounter:
    """A number in a file, written in place after every step, so that even a kill -9 leaves the true count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = int(path.read_text() or 0) if path.exists() else 0
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._write()

    def add(self) -> None:
        self._count += 1
        self._write()

    def _write(self) -> None:
        with disk_errors(self._path):
            os.pwrite(self._descriptor, b"%020d" % self._count, 0)

    def close(self) -> None:
        os.close(self._descriptor)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python, and of those of `packages` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
