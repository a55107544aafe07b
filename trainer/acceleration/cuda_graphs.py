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

from trainer.acceleration.streams import CaptureError, ExclusiveStream, capture_graph
from trainer.distributed.world import World

_WARMUP_STEPS = 3  # cuDNN's search, compilation and lazy allocations happen in these

Inputs = Mapping[str, torch.Tensor]
Values = Mapping[str, torch.Tensor]
StaticSizes = tuple[int, ...]
"""Sizes that the work depends on besides the shapes of its inputs."""


@dataclass(frozen=True)
class SyncPoint:
    """A point inside a step: what has just been done, and tensors that ranks add up, in place, before it goes on."""

    done: str
    tensors: tuple[torch.Tensor, ...] = ()


StepProgram = Generator[SyncPoint, None, Values]


class PhaseTimer(Protocol):
    """Told when the phases of a step end."""

    def mark(self, done: str) -> None: ...


def run_eagerly(program: StepProgram, world: World, timer: PhaseTimer | None = None) -> Values:
    """The work from beginning to end, as it is written."""
    while True:
        try:
            sync_point = next(program)
        except StopIteration as end:
            values: Values = end.value
            return values
        _synchronise(sync_point, world, timer)


def _synchronise(sync_point: SyncPoint, world: World, timer: PhaseTimer | None) -> None:
    if timer is not None:
        timer.mark(sync_point.done)
    for tensor in sync_point.tensors:
        world.all_reduce(tensor)
    if timer is not None and sync_point.tensors and world.rank_group is not None:
        timer.mark("exchange")


@dataclass(frozen=True)
class _Recording:
    """Graphs of one step, replayed in this order, each but the last followed by its meeting."""

    inputs: Inputs
    """What the graphs read: each step's values are copied into these."""
    stretches: tuple[tuple[torch.cuda.CUDAGraph, SyncPoint | None], ...]
    values: Values
    """What the graphs write, overwritten by the next replay."""


class GraphedStep:
    """Records the work of a step when its shape is new, then replays it. Shapes that were left do not come back."""

    def __init__(
        self,
        program: Callable[[Inputs, StaticSizes], StepProgram],
        world: World,
        without_effects: Callable[[], AbstractContextManager[None]],
        timer: PhaseTimer | None = None,
    ) -> None:
        """rehearsing: inside it, steps leave no trace."""
        self._work, self._world, self._without_effects, self._timer = program, world, without_effects, timer
        self._on = ExclusiveStream(world.device)  # kernels keep its priority: they go before a decoder's
        self._known: tuple[object, _Recording] | None = None

    def __call__(self, inputs: Inputs, fixed: StaticSizes) -> Values:
        key = (fixed, tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self._known is None or self._known[0] != key:
            self._known = None  # first of all its memory: the new one needs as much
            self._known = key, self._record(inputs, fixed)
            if self._timer is not None:
                self._timer.mark("warm_up")
        recording = self._known[1]
        for name, tensor in inputs.items():
            recording.inputs[name].copy_(tensor, non_blocking=True)
        for graph, sync_point in recording.stretches:
            graph.replay()
            if sync_point is not None:
                _synchronise(sync_point, self._world, self._timer)
        return recording.values

    def _record(self, inputs: Inputs, fixed: StaticSizes) -> _Recording:
        held = {name: tensor.clone() for name, tensor in inputs.items()}
        with self._without_effects():
            self._on.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._on.stream):
                for _ in range(_WARMUP_STEPS):
                    run_eagerly(self._work(held, fixed), self._world)
            torch.cuda.current_stream().wait_stream(self._on.stream)
            return self._agreed(held, fixed)

    def _agreed(self, held: Inputs, fixed: StaticSizes) -> _Recording:
        """What was captured, on all ranks or on none: those that record do more sums than those that do not."""
        recording, failure = None, None
        try:
            recording = self._captured(held, fixed)
        except CaptureError as error:
            failure = str(error)  # not the error itself, which holds on to all the memory of the attempt
        failed = self._world.all_reduce(torch.tensor(float(failure is not None), device=self._world.device))
        if failed > 0 or recording is None:
            raise CaptureError(failure or "another rank cannot")
        return recording

    def _captured(self, held: Inputs, fixed: StaticSizes) -> _Recording:
        """Nothing is executed here; graphs share a pool, since what one leaves in memory the next one reads."""
        program, stretches, pool = self._work(held, fixed), [], torch.cuda.graph_pool_handle()
        values: Values | None = None
        while values is None:
            sync_point = None
            with capture_graph(self._on.stream, pool) as graph:
                while values is None and sync_point is None:
                    try:
                        met = next(program)
                        sync_point = met if self._splits(met) else None
                    except StopIteration as end:
                        values = end.value
            stretches.append((graph, sync_point))
        return _Recording(held, tuple(stretches), values)

    def _splits(self, sync_point: SyncPoint) -> bool:
        return self._timer is not None or (bool(sync_point.tensors) and self._world.rank_group is not None)
