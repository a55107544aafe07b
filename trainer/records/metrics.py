"""Writes metrics.jsonl: one line every few steps; on resume, lines after the checkpoint are dropped."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shards.durable import disk_errors, write_bytes
from shards.regular_file import open_to_append
from trainer.loading.transfer import HostCopy

COUNTED = "counted"
"""Name of a metric that is 1 for a normal step and 0 if all images of the step were unreadable."""
_SHOWN = ("loss", "train_accuracy")  # in the progress view, beside the accuracies on evaluation sets
_STEP_0 = b'{"step": 0,'  # how a line begins that was written before the first step
_MOST_PENDING = 8  # lines whose numbers the GPU has not computed yet


@dataclass(frozen=True)
class _Line:
    """A line of the file whose numbers may still be on their way from the device."""

    facts: Mapping[str, Any]
    names: tuple[str, ...]
    sums: HostCopy | None
    """float64 [len(names)]; None: no step since the last line."""

    @property
    def is_ready(self) -> bool:
        return self.sums is None or self.sums.is_ready

    def means(self) -> dict[str, float]:
        steps, sums = _split(self.names, None if self.sums is None else self.sums.get())
        return {name: total / steps for name, total in sums.items() if steps}


class MetricsLog:
    """Averages metrics over the steps between two lines, on the device."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        """writes: whether to write the file; true only on rank 0."""
        self._path, self._writes = path, writes
        self.on_line: Callable[[Mapping[str, Any]], None] | None = None
        """Called with every line that is written."""
        self._names: tuple[str, ...] = ()
        self._sums: torch.Tensor | None = None
        self._is_loaded = False  # whether the sums begin with those of a checkpoint
        self._pending: deque[_Line] = deque()
        self._shown: dict[str, float] = {}

    def has_steps(self) -> bool:
        """Whether there is a line after a step, that is, besides one of what was measured before the first step."""
        if not self._path.exists():
            return False
        return any(line and not line.startswith(_STEP_0) for line in self._path.read_bytes().splitlines())

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
        counted = values[COUNTED] if COUNTED in values else torch.ones_like(next(iter(values.values())))
        # Last, as in the sums of a checkpoint, wherever a Task puts it.
        values = {name: value for name, value in values.items() if name != COUNTED} | {COUNTED: counted}
        # Only two operations, however many values; a new tensor, because the next step overwrites the values.
        stacked = torch.stack([value.detach() for value in values.values()])
        if self._names != tuple(values):
            # Steps of an earlier version may have reported other metrics: the means are then those since the resume.
            assert self._sums is None or self._is_loaded, f"{tuple(values)} after steps that reported {self._names}"
            self._names, self._sums = tuple(values), torch.zeros_like(stacked, dtype=torch.float64)
        assert self._sums is not None
        self._sums += stacked

    def write(self, wait: bool = True, /, **facts: Any) -> str:
        """Append a line with `facts` and the means since the last line; returns a short text for the progress bar.

        wait: for the device. Otherwise the line follows in a later call, once its numbers have arrived, and the text
        is that of the last line in the file.
        """
        sums = None if self._sums is None else HostCopy(self._sums)
        self._pending.append(_Line(facts, self._names, sums))
        self._reset()
        while self._pending and (wait or self._pending[0].is_ready or len(self._pending) > _MOST_PENDING):
            self._append(self._pending.popleft())
        return ", ".join(f"{name} {value:.3f}" for name, value in self._shown.items())

    def _append(self, pending: _Line) -> None:
        means = pending.means()
        rounded = {name: round(mean, 6) if math.isfinite(mean) else None for name, mean in means.items()}
        line = {**pending.facts, **rounded}
        if self._writes:
            with disk_errors(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open_to_append(self._path) as file:
                    file.write(json.dumps(line).encode() + b"\n")
            if self.on_line is not None:
                self.on_line(line)
        shown = {name: value for name, value in line.items() if name in _SHOWN or name.startswith("accuracy.")}
        self._shown |= {name: value for name, value in shown.items() if value is not None}

    def state(self) -> dict[str, Any]:
        """Return the sums since the last line, which is in the file by then."""
        while self._pending:
            self._append(self._pending.popleft())
        steps, sums = _split(self._names, self._sums)
        return {"sums": sums, "steps": steps}

    def load(self, state: dict[str, Any], device: torch.device) -> None:
        self._reset()
        self._pending.clear()
        if state["sums"]:
            sums = {**state["sums"], COUNTED: state["steps"]}
            self._names, self._is_loaded = tuple(sums), True
            self._sums = torch.tensor(list(sums.values()), dtype=torch.float64, device=device)

    def _reset(self) -> None:
        self._names, self._sums, self._is_loaded = (), None, False


def _split(names: tuple[str, ...], numbers: torch.Tensor | None) -> tuple[int, dict[str, float]]:
    """Return the number of counted steps and the sums over them. numbers: one for each name; None before a step."""
    if numbers is None:
        return 0, {}
    sums = dict(zip(names, numbers.tolist(), strict=True))
    return round(sums.pop(COUNTED)), sums
