"""Interleave several training jobs in one process, a few steps of each in turn: one small network underuses a GPU."""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch

from trainer.distributed.stop import Stopped
from trainer.records.logs import LogTarget, current_target, set_target

STEPS_PER_TURN = 4
"""Steps of a job before the next takes its turn: swapping the process-wide state costs as much as a small step."""

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A training job as a generator: yields after each step, and returns the job's result."""


def run_to_end(steps: Steps[Result]) -> Result:
    """Run all steps of a training job and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass(frozen=True)
class _ProcessState:
    """Process-wide state that is swapped when another training job takes its turn: random state and log target."""

    draws: torch.Tensor
    """State of torch's CPU generator."""
    gpu_draws: torch.Generator | None
    """State of the GPU's default generator; None on a CPU. Not a copy: captured CUDA graphs refer to this object."""
    log_target: LogTarget

    @classmethod
    def now(cls, device: torch.device) -> "_ProcessState":
        generator = _generator_of(device)
        state = None if generator is None else generator.graphsafe_get_state()
        return cls(torch.get_rng_state(), state, current_target())

    def copy(self) -> "_ProcessState":
        return replace(self, gpu_draws=None if self.gpu_draws is None else self.gpu_draws.clone_state())

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.draws)
        generator = _generator_of(device)
        if generator is not None and self.gpu_draws is not None:
            generator.graphsafe_set_state(self.gpu_draws)
        set_target(self.log_target)


def _generator_of(device: torch.device) -> torch.Generator | None:
    """Return torch's default generator for a GPU, or None for a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.init()  # creates the generators
    return torch.cuda.default_generators[device.index or 0]


@dataclass
class _Lane(Generic[Result]):
    """One training job with its CUDA stream, its process-wide state, and its result or the Stopped that ended it."""

    steps: Steps[Result]
    device: torch.device
    process_state: _ProcessState
    stream: torch.cuda.Stream | None = None
    ended: list[Result] = field(default_factory=list)
    stopped: Stopped | None = None

    @property
    def goes_on(self) -> bool:
        return not self.ended and self.stopped is None

    def advance(self, steps: int) -> None:
        with self._own_process_state():
            try:
                for _ in range(steps):
                    next(self.steps)
            except StopIteration as end:
                self.ended.append(end.value)
            except Stopped as stopped:
                self.stopped = stopped

    def close(self) -> None:
        with self._own_process_state():
            self.steps.close()

    @contextmanager
    def _own_process_state(self) -> Iterator[None]:
        before = _ProcessState.now(self.device)
        self.process_state.restore(self.device)
        try:
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                yield
        finally:
            self.process_state = _ProcessState.now(self.device)
            before.restore(self.device)


def interleave(
    trainings: Sequence[Steps[Result]],
    device: torch.device,
    at_once: int | None = None,
    steps_per_turn: int = STEPS_PER_TURN,
) -> Steps[list[Result]]:
    """Run training jobs in turn and return their results, each the same as if the job had run alone.

    On a GPU every job has its own stream. at_once: maximum number of jobs in progress; None: all. A stop request
    reaches all jobs: each saves a checkpoint, then the first Stopped is raised.
    """
    streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in trainings]
    process_state = _ProcessState.now(device)
    lanes = [
        _Lane(steps, device, process_state.copy(), stream) for steps, stream in zip(trainings, streams, strict=True)
    ]
    waiting = deque(lanes)
    under_way: list[_Lane[Result]] = []
    try:
        while waiting or under_way:
            while waiting and len(under_way) < (at_once or len(lanes)):
                under_way.append(waiting.popleft())
            for lane in under_way:
                lane.advance(steps_per_turn)
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
