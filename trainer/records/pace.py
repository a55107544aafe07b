"""How fast a training job goes, and how long it, its stage and its run will still take.

These times are in the lines of metrics.jsonl, in the trackers and in the progress view. They differ between two runs
that are otherwise bitwise identical: `remove_times` leaves them out of a line.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

TIMES = ("images_per_s", "data_wait", "left_s", "stage_left_s", "run_left_s")
"""Keys of metrics.jsonl: images of all ranks per second, and the share of the time that the loop waited for batches,
both since the last line; the estimated seconds to the end of the training job, of its stage and of the run."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Later:
    """The training that follows a job, in multiples of the job: in its stage, and in later stages of the run."""

    in_stage: float = 0.0
    in_later_stages: float = 0.0


NOTHING_LATER = Later()


class Pace:
    """Measures one training job in one start. Its first step, which may compile, is left out."""

    def __init__(
        self, total_steps: int, later: Later = NOTHING_LATER, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total, self._later, self._clock = total_steps, later, clock
        self._steps = -1  # of this start, without the first
        self._began = clock()
        self._reset()

    def _reset(self) -> None:
        self._since, self._images, self._waited, self._aside = self._clock(), 0, 0.0, 0.0

    def time_waits(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches and measure how long each took to arrive."""
        waiting = iter(batches)
        while True:
            asked = self._clock()
            batch = next(waiting, None)
            if batch is None:
                return
            self._waited += self._clock() - asked
            yield batch

    def end_step(self, images: int) -> None:
        """Count a step. images: of all ranks."""
        self._steps += 1
        self._images += images
        if self._steps == 0:
            self._began = self._clock()
            self._reset()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time in the block, such as an evaluation, out of the rates; it counts for the time left."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside += self._clock() - began

    def measure(self, done: int) -> dict[str, float]:
        """Return the times for a line after `done` steps of the job; {} before the second step of this start."""
        now = self._clock()
        seconds = now - self._since - self._aside
        if self._steps < 1 or not self._images or seconds <= 0:
            return {}
        rates = {"images_per_s": self._images / seconds, "data_wait": min(self._waited / seconds, 1.0)}
        left = estimate_left((now - self._began) / self._steps, done, self._total, self._later)
        self._reset()
        return {name: float(f"{value:.4g}") for name, value in zip(TIMES, (*rates.values(), *left), strict=True)}


def estimate_left(seconds_per_step: float, done: int, total: int, later: Later) -> tuple[float, float, float]:
    """Return the seconds to the end of the job, of its stage and of the run, if all that follows goes as fast."""
    job, whole = seconds_per_step * (total - done), seconds_per_step * total
    stage = job + later.in_stage * whole
    return job, stage, stage + later.in_later_stages * whole


def remove_times(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl without what the speed of the machine decides."""
    return {name: value for name, value in line.items() if name not in TIMES}


def describe_pace(times: Mapping[str, float], epoch: float, epochs: int) -> str:
    """Describe the position and the times for the progress view."""
    words = [f"epoch {epoch:.1f}/{epochs}"]
    if times:
        words.append(f"{times['images_per_s']:,.0f} images/s, data wait {100 * times['data_wait']:.0f} %")
        stage, run = (tqdm.format_interval(times[name]) for name in ("stage_left_s", "run_left_s"))
        words.append(f"left: stage {stage}, run {run}")
    return ", ".join(words)
