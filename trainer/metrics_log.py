"""metrics.jsonl: one line every few steps; cut back to the checkpoint on resume."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shards.durable import disk_errors, write_bytes


class MetricsLog:
    """Averages what the task reports between two lines; reads the device only when a line is written."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        """writes: False on ranks that leave the file to the first."""
        self._path, self._writes = path, writes
        self._sums: dict[str, torch.Tensor] = {}
        self._steps = 0

    def has_lines(self) -> bool:
        return self._path.exists() and self._path.stat().st_size > 0

    def cut_back(self, step: int) -> None:
        """Forget what was logged after `step`: those steps will be executed again."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line.rstrip("\n") + "\n")
            except (json.JSONDecodeError, KeyError):
                break  # a line torn by a kill is the last one
        write_bytes(self._path, "".join(kept).encode())

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        if not values:  # a step that was none
            return
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._steps += 1

    def write(self, **facts: Any) -> str:
        """Append a line of the means since the last one; returns a short note for the progress bar."""
        means = {name: float(total) / self._steps for name, total in self._sums.items()}
        self._sums, self._steps = {}, 0
        shown = {name: round(mean, 6) if math.isfinite(mean) else None for name, mean in means.items()}
        line = {**facts, **shown}
        if self._writes:
            with disk_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items() if name == "loss")

    def state(self) -> dict[str, Any]:
        return {"sums": {name: float(total) for name, total in self._sums.items()}, "steps": self._steps}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        self._sums = {
            name: torch.tensor(total, dtype=torch.float64, device=device) for name, total in state["sums"].items()
        }
        self._steps = state["steps"]
