"""Measures the time spent in each phase of a training, for `--profile`, and writes the profile files."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from shards.durable import read_json, write_json
from shards.errors import InputError
from trainer.records.profile_trace import StepTrace

_log = logging.getLogger(__name__)

FILE = "profile.json"
"""In a training's folder it has one entry per start; in the run directory, the entries of all trainings."""
PHASES = ("data_wait", "step", "predict", "checkpoint", "warm_up")
_NOT_IN_ALL = ("predict",)
_NO_PHASE, _ELSEWHERE = "other", "elsewhere"
_MOST_PENDING = 200

Item = TypeVar("Item")


class _Timeline(Protocol):
    """Sums the seconds between successive marks, by the name of the later mark."""

    seconds: dict[str, float]

    def mark(self, name: str) -> None: ...

    def settle(self) -> None:
        """Add the time of the marks that the device has reached; non-blocking."""
        ...


class _HostTimeline:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def settle(self) -> None:
        """Do nothing: `mark` adds the time at once."""


class _DeviceTimeline:
    """Measures GPU time with CUDA events on the current stream, without host-device syncs."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event]] = deque()
        self._last: torch.cuda.Event | None = None
        self._spare: list[torch.cuda.Event] = []
        self.mark(_NO_PHASE)

    def mark(self, name: str) -> None:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((name, event))
        if len(self._pending) > _MOST_PENDING:
            self.settle()

    def settle(self) -> None:
        while self._pending and self._pending[0][1].query():
            name, event = self._pending.popleft()
            if self._last is not None:
                self.seconds[name] = self.seconds.get(name, 0.0) + self._last.elapsed_time(event) / 1000
                self._spare.append(self._last)
            self._last = event


class Stopwatch:
    """Measures one training in one start; the training loop reports batches and steps to it."""

    def __init__(self, device: torch.device, start: int, trace: StepTrace | None = None) -> None:
        self._device, self._start, self._trace = device, start, trace
        self._before: list[dict[str, Any]] | None = None
        self.begin()

    def begin(self) -> None:
        """Start measuring; call at the beginning of the training."""
        self._began, self._steps = time.perf_counter(), 0
        self._timeline: _Timeline = _DeviceTimeline() if self._device.type == "cuda" else _HostTimeline()

    def mark(self, done: str) -> None:
        """Mark the end of the phase `done`. The first batch and step, with any compilation, count as warm-up."""
        self._timeline.mark(done if self._steps else "warm_up")

    def end_step(self) -> None:
        self.mark("step")
        self._steps += 1
        if self._trace is not None:
            self._trace.end_step(self._steps)

    def time_each(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches and measure the wait for each as `data_wait`; on a GPU, only its idle time counts."""
        try:
            self._timeline.mark(_NO_PHASE)
            for batch in batches:
                self.mark("data_wait")
                yield batch
                self._timeline.mark(_NO_PHASE)
        finally:  # no more steps follow
            if self._trace is not None:
                self._trace.stop()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count the time inside the block as `phase`; for use between steps."""
        self._timeline.mark(_NO_PHASE)
        try:
            yield
        finally:
            self._timeline.mark(phase)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the time inside the block, in which other trainings of this process run."""
        self._timeline.mark(_NO_PHASE)
        yield
        self._timeline.mark(_ELSEWHERE)

    def write(self, folder: Path, stage: str, round_: int | None, fold: int | None) -> None:
        """Write the measurements so far, after the entries of earlier starts. A failure only prints a warning."""
        if not self._steps:
            return
        where = {"stage": stage, "round": round_, "fold": fold, "start": self._start}
        try:
            if self._before is None:
                self._before = [entry for entry in read_entries(folder / FILE) if entry.get("start") != self._start]
            write_json(folder / FILE, [*self._before, where | self._measured()])
            if self._trace is not None:
                self._trace.write(folder)
        except (InputError, OSError, RuntimeError) as error:
            _log.warning("the profile of %s was not written: %s", stage, error)

    def _measured(self) -> dict[str, Any]:
        self._timeline.settle()
        wall, found = time.perf_counter() - self._began, self._timeline.seconds
        on_gpu = self._device.type == "cuda"
        if not on_gpu:  # a GPU may work on this training while the host runs another
            wall -= found.get(_ELSEWHERE, 0.0)
        seconds = {name: found.get(name, 0.0) for name in PHASES if name in found or name not in _NOT_IN_ALL}
        seconds["other"] = max(wall - sum(seconds.values()), 0.0)
        return {
            "device": torch.cuda.get_device_name(self._device) if on_gpu else "CPU",
            "steps": self._steps,
            "wall_s": round(wall, 6),
            "seconds": {name: round(value, 6) for name, value in seconds.items()},
        }


class Profile:
    """The stopwatches of a start, by training name."""

    def __init__(self, device: torch.device, start: int, trace: bool = False) -> None:
        """start: number of this start; trace: also write a torch.profiler trace of each training."""
        self._device, self._start, self._traces = device, start, trace
        self._watches: dict[str, Stopwatch] = {}

    def of(self, training: str) -> Stopwatch:
        if training not in self._watches:
            trace = StepTrace(self._device) if self._traces else None
            self._watches[training] = Stopwatch(self._device, self._start, trace)
        return self._watches[training]


def merge_profiles(root: Path, stages: Sequence[str]) -> None:
    """Merge the entries of all trainings into the run directory's profile.json; call on one rank only.

    stages: stage names, in the order in which their entries are written.
    """
    files = [*(root / "rounds").glob(f"*/fold*/{FILE}"), *(root / "methods").glob(f"*/{FILE}")]
    entries = sorted((entry for file in files for entry in read_entries(file)), key=partial(_order, stages))
    if not entries and not (root / FILE).exists():
        return
    try:
        write_json(root / FILE, entries)
    except (InputError, OSError) as error:
        _log.warning("%s was not written: %s", root / FILE, error)


def _order(stages: Sequence[str], entry: dict[str, Any]) -> tuple[int, ...]:
    stage = entry.get("stage")
    numbers = [entry.get(key) or 0 for key in ("round", "fold", "start")]
    return stages.index(stage) if stage in stages else len(stages), *numbers


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a profile file; empty if it is missing or malformed."""
    try:
        content = read_json(path) if path.exists() else []
    except InputError:
        return []
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []
