"""Several trainings in one process, a step of each in turn: small networks leave a GPU room for more than one."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from trainer.checkpoint import load_random_state, random_state
from trainer.stop_request import Stopped

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A training as steps; its result when it has ended."""


def to_the_end(steps: Steps[Result]) -> Result:
    """One training, all its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass
class _Lane(Generic[Result]):
    """One of the trainings: its stream, its random draws, and how it ended."""

    steps: Steps[Result]
    device: torch.device
    draws: dict[str, torch.Tensor]
    stream: torch.cuda.Stream | None = None
    ended: list[Result] = field(default_factory=list)
    stopped: Stopped | None = None

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.stopped is None

    def advance(self) -> None:
        with self._own_draws(), torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            try:
                next(self.steps)
            except StopIteration as end:
                self.ended.append(end.value)
            except Stopped as stopped:
                self.stopped = stopped

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """The lane draws as if it were alone."""
        load_random_state(self.draws, self.device)
        try:
            yield
        finally:
            self.draws = random_state(self.device)


def side_by_side(trainings: Sequence[Steps[Result]], device: torch.device) -> list[Result]:
    """The results of all, each what it would be alone; on a GPU every training has a stream of its own.

    A stop is asked of all of them: each saves where it is, then the first one's Stopped is raised.
    """
    before = random_state(device)
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in trainings]
    lanes = [_Lane(steps, device, before, stream) for steps, stream in zip(trainings, streams, strict=True)]
    try:
        while any(lane.goes_on for lane in lanes):
            for lane in lanes:
                if lane.goes_on:
                    lane.advance()
    finally:
        for lane in lanes:
            lane.steps.close()
        load_random_state(before, device)
    for lane in lanes:
        if lane.stopped is not None:
            raise lane.stopped
    return [lane.ended[0] for lane in lanes]
