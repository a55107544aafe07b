"""Writes metrics.jsonl: one line every few steps; on resume, lines after the checkpoint are dropped."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shards.durable import disk_errors, write_bytes

COUNTED = "counted"
"""Name of a metric that is 1 for a normal step and 0 if all images of the step were unreadable."""


class MetricsLog:
    """Averages metrics over the steps between two lines; syncs with the device only to write a line."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        """writes: whether to write the file; true only on rank 0."""
        self._path, self._writes = path, writes
        self.on_line: Callable[[Mapping[str, Any]], None] | None = None
        """Called with every line that is written."""
        self._names: tuple[str, ...] = ()
        self._sums: torch.Tensor | None = None

    def has_lines(self) -> bool:
        return self._path.exists() and self._path.stat().st_size > 0

    def truncate_after(self, step: int) -> None:
        """Drop the lines after `step`, because those steps will be executed again."""
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line.rstrip("\n") + "\n")
            except (json.JSONDecodeError, KeyError):
                break  # only the last line can be incomplete, after a kill
        write_bytes(self._path, "".join(kept).encode())

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of a step. values: scalars; COUNTED = 0 excludes the step from the means."""
        if COUNTED not in values:
            values = {**values, COUNTED: torch.ones_like(next(iter(values.values())))}
        # Only two operations, however many values; a new tensor, because the next step overwrites the values.
        stacked = torch.stack([value.detach() for value in values.values()])
        if self._names != tuple(values):
            assert self._sums is None, f"a step reports {tuple(values)} after steps that reported {self._names}"
            self._names, self._sums = tuple(values), torch.zeros_like(stacked, dtype=torch.float64)
        assert self._sums is not None
        self._sums += stacked

    def write(self, **facts: Any) -> str:
        """Append a line with `facts` and the means since the last line; returns a short text for the progress bar."""
        steps, sums = self._read()
        means = {name: total / steps for name, total in sums.items() if steps}
        self._reset()
        rounded = {name: round(mean, 6) if math.isfinite(mean) else None for name, mean in means.items()}
        line = {**facts, **rounded}
        if self._writes:
            with disk_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if self.on_line is not None:
                self.on_line(line)
        return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items() if name == "loss")

    def state(self) -> dict[str, Any]:
        steps, sums = self._read()
        return {"sums": sums, "steps": steps}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        self._reset()
        if state["sums"]:
            sums = {**state["sums"], COUNTED: state["steps"]}
            self._names = tuple(sums)
            self._sums = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)

    def _reset(self) -> None:
        self._names, self._sums = (), None

    def _read(self) -> tuple[int, dict[str, float]]:
        """Return the number of counted steps and the sums over them, with one device sync."""
        if self._sums is None:
            return 0, {}
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        return round(sums.pop(COUNTED)), sums
