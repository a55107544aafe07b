"""Several trainings in one process, a step of each in turn: small networks leave a GPU room for more than one."""

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TextIO, TypeVar

import torch

from trainer.checkpoint import load_random_state, random_state
from trainer.stop_request import Stopped

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A training as steps; its result when it has ended."""


def to_the_end(steps: Steps[Result]) -> Result:
    """All steps of one."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass(frozen=True)
class _Surface:
    """What a process has only one of, and every training uses as if it were its own: random draws, output."""

    draws: dict[str, torch.Tensor]
    outputs: tuple[TextIO, TextIO]

    @classmethod
    def now(cls, device: torch.device) -> "_Surface":
        return cls(random_state(device), (sys.stdout, sys.stderr))

    def restore(self, device: torch.device) -> None:
        load_random_state(self.draws, device)
        sys.stdout, sys.stderr = self.outputs


@dataclass
class _Lane(Generic[Result]):
    """One of the trainings: its stream, its surface, and how it ended."""

    steps: Steps[Result]
    device: torch.device
    surface: _Surface
    stream: torch.cuda.Stream | None = None
    ended: list[Result] = field(default_factory=list)
    stopped: Stopped | None = None

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.stopped is None

    def advance(self) -> None:
        with self._own_surface():
            try:
                next(self.steps)
            except StopIteration as end:
                self.ended.append(end.value)
            except Stopped as stopped:
                self.stopped = stopped

    def close(self) -> None:
        with self._own_surface():
            self.steps.close()

    @contextmanager
    def _own_surface(self) -> Iterator[None]:
        before = _Surface.now(self.device)
        self.surface.restore(self.device)
        try:
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                yield
        finally:
            self.surface = _Surface.now(self.device)
            before.restore(self.device)


def side_by_side(
    trainings: Sequence[Steps[Result]], device: torch.device, at_once: int | None = None
) -> Steps[list[Result]]:
    """The results of all, each what it would be alone; on a GPU every training has a stream of its own.

    at_once: most that are under way together; None: all. A stop is asked of all of them: each saves where it is, then
    the first one's Stopped is raised.
    """
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in trainings]
    surface = _Surface.now(device)
    lanes = [_Lane(steps, device, surface, stream) for steps, stream in zip(trainings, streams, strict=True)]
    waiting = deque(lanes)
    under_way: list[_Lane[Result]] = []
    try:
        while waiting or under_way:
            while waiting and len(under_way) < (at_once or len(lanes)):
                under_way.append(waiting.popleft())
            for lane in under_way:
                lane.advance()
            under_way = [lane for lane in under_way if lane.goes_on]
            if under_way:
                yield
    finally:
        for lane in lanes:
            lane.close()
    for lane in lanes:
        if lane.stopped is not None:
            raise lane.stopped
    return [lane.ended[0] for lane in lanes]
