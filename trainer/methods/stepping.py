"""How a step's work is carried out: as it is written, or replayed from CUDA graphs that recorded it once.

The work of a step is a generator. It reads nothing back to the host, and its shapes are fixed; where ranks must add
something up it yields a Meeting. So one text serves all ways to run it: eagerly; in one graph for one rank; in
several graphs for several ranks, whose sums are ordinary calls between the replays.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.gpu import CannotRecord, OwnStream, capturing
from trainer.world import World

_REHEARSALS = 3  # cuDNN's search, compilation and lazy allocations happen in these

Inputs = Mapping[str, torch.Tensor]
Values = Mapping[str, torch.Tensor]
Fixed = tuple[int, ...]
"""Sizes that the work depends on besides the shapes of its inputs."""


@dataclass(frozen=True)
class Meeting:
    """A point inside a step: what has just been done, and tensors that ranks add up, in place, before it goes on."""

    done: str
    tensors: tuple[torch.Tensor, ...] = ()


Work = Generator[Meeting, None, Values]


class Clock(Protocol):
    """Told when the phases of a step end."""

    def mark(self, done: str) -> None: ...


def carried_out(work: Work, world: World, clock: Clock | None = None) -> Values:
    """The work from beginning to end, as it is written."""
    while True:
        try:
            meeting = next(work)
        except StopIteration as end:
            values: Values = end.value
            return values
        _meet(meeting, world, clock)


def _meet(meeting: Meeting, world: World, clock: Clock | None) -> None:
    if clock is not None:
        clock.mark(meeting.done)
    for tensor in meeting.tensors:
        world.sum_(tensor)
    if clock is not None and meeting.tensors and world.ties is not None:
        clock.mark("exchange")


@dataclass(frozen=True)
class _Recording:
    """Graphs of one step, replayed in this order, each but the last followed by its meeting."""

    inputs: Inputs
    """What the graphs read: each step's values are copied into these."""
    stretches: tuple[tuple[torch.cuda.CUDAGraph, Meeting | None], ...]
    values: Values
    """What the graphs write, overwritten by the next replay."""


class Replay:
    """Records the work of a step when its shape is new, then replays it. Shapes that were left do not come back."""

    def __init__(
        self,
        work: Callable[[Inputs, Fixed], Work],
        world: World,
        rehearsing: Callable[[], AbstractContextManager[None]],
        clock: Clock | None = None,
    ) -> None:
        """rehearsing: inside it, steps leave no trace."""
        self._work, self._world, self._rehearsing, self._clock = work, world, rehearsing, clock
        self._on = OwnStream(world.device)  # kernels keep its priority: they go before a decoder's
        self._known: tuple[object, _Recording] | None = None

    def __call__(self, inputs: Inputs, fixed: Fixed) -> Values:
        key = (fixed, tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self._known is None or self._known[0] != key:
            self._known = None  # first of all its memory: the new one needs as much
            self._known = key, self._record(inputs, fixed)
            if self._clock is not None:
                self._clock.mark("warm_up")
        recording = self._known[1]
        for name, tensor in inputs.items():
            recording.inputs[name].copy_(tensor, non_blocking=True)
        for graph, meeting in recording.stretches:
            graph.replay()
            if meeting is not None:
                _meet(meeting, self._world, self._clock)
        return recording.values

    def _record(self, inputs: Inputs, fixed: Fixed) -> _Recording:
        held = {name: tensor.clone() for name, tensor in inputs.items()}
        with self._rehearsing():
            self._on.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._on.stream):
                for _ in range(_REHEARSALS):
                    carried_out(self._work(held, fixed), self._world)
            torch.cuda.current_stream().wait_stream(self._on.stream)
            return self._agreed(held, fixed)

    def _agreed(self, held: Inputs, fixed: Fixed) -> _Recording:
        """What was captured, on all ranks or on none: those that record do more sums than those that do not."""
        recording, failure = None, None
        try:
            recording = self._captured(held, fixed)
        except CannotRecord as error:
            failure = str(error)  # not the error itself, which holds on to all the memory of the attempt
        failed = self._world.sum_(torch.tensor(float(failure is not None), device=self._world.device))
        if failed > 0 or recording is None:
            raise CannotRecord(failure or "another rank cannot")
        return recording

    def _captured(self, held: Inputs, fixed: Fixed) -> _Recording:
        """Nothing is executed here; graphs share a pool, since what one leaves in memory the next one reads."""
        work, stretches, pool = self._work(held, fixed), [], torch.cuda.graph_pool_handle()
        values: Values | None = None
        while values is None:
            meeting = None
            with capturing(self._on.stream, pool) as graph:
                while values is None and meeting is None:
                    try:
                        met = next(work)
                        meeting = met if self._splits(met) else None
                    except StopIteration as end:
                        values = end.value
            stretches.append((graph, meeting))
        return _Recording(held, tuple(stretches), values)

    def _splits(self, meeting: Meeting) -> bool:
        return self._clock is not None or (bool(meeting.tensors) and self._world.ties is not None)
