"""How a training step runs: eagerly, or replayed from CUDA graphs.

A step is a generator with fixed shapes and no host-device sync. Where ranks must add tensors up, it yields a
SyncPoint. So one program serves every way to run it: eagerly; as one graph on one rank; as several graphs on several
ranks, with the all-reduces as ordinary calls between the replays.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from trainer.acceleration.streams import CaptureError, ExclusiveStream, capture_graph
from trainer.distributed.world import World

_WARMUP_STEPS = 3  # cuDNN's search, compilation and lazy allocations happen in these

Inputs = Mapping[str, torch.Tensor]
Values = Mapping[str, torch.Tensor]
StaticSizes = tuple[int, ...]
"""Sizes that the step depends on besides the shapes of its inputs."""


@dataclass(frozen=True)
class SyncPoint:
    """A point inside a step where ranks add these tensors up, in place."""

    tensors: tuple[torch.Tensor, ...]


StepProgram = Generator[SyncPoint, None, Values]


def run_eagerly(program: StepProgram, world: World) -> Values:
    """Run a step from beginning to end, kernel by kernel."""
    while True:
        try:
            sync_point = next(program)
        except StopIteration as end:
            values: Values = end.value
            return values
        _all_reduce(sync_point, world)


def _all_reduce(sync_point: SyncPoint, world: World) -> None:
    for tensor in sync_point.tensors:
        world.all_reduce(tensor)


@dataclass(frozen=True)
class _CapturedStep:
    """The graphs of one step, replayed in this order, each but the last followed by its sync point."""

    inputs: Inputs
    """What the graphs read: each step's values are copied into these."""
    segments: tuple[tuple[torch.cuda.CUDAGraph, SyncPoint | None], ...]
    values: Values
    """What the graphs write, overwritten by the next replay."""


class GraphedStep:
    """Captures a step when its shape is new, then replays it. Only the last shape is kept: old ones do not return."""

    def __init__(
        self,
        program: Callable[[Inputs, StaticSizes], StepProgram],
        world: World,
        without_effects: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """without_effects: inside it, steps change no state; warm-up steps run there."""
        self._program, self._world, self._without_effects = program, world, without_effects
        # Captured kernels keep the stream's high priority: they go before a decoder's.
        self._exclusive = ExclusiveStream(world.device)
        self._known: tuple[object, _CapturedStep] | None = None

    def __call__(self, inputs: Inputs, sizes: StaticSizes) -> Values:
        key = (sizes, tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self._known is None or self._known[0] != key:
            self._known = None  # free its memory first: the new graphs need as much
            self._known = key, self._capture(inputs, sizes)
        captured = self._known[1]
        for name, tensor in inputs.items():
            captured.inputs[name].copy_(tensor, non_blocking=True)
        for graph, sync_point in captured.segments:
            graph.replay()
            if sync_point is not None:
                _all_reduce(sync_point, self._world)
        return captured.values

    def _capture(self, inputs: Inputs, sizes: StaticSizes) -> _CapturedStep:
        """Warm up on the capture stream, then capture."""
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        stream = self._exclusive.stream
        with self._without_effects():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARMUP_STEPS):
                    run_eagerly(self._program(static, sizes), self._world)
            torch.cuda.current_stream().wait_stream(stream)
            return self._capture_on_all_ranks(static, sizes)

    def _capture_on_all_ranks(self, static: Inputs, sizes: StaticSizes) -> _CapturedStep:
        """Capture on all ranks or on none: ranks that capture make more all-reduces than those that do not."""
        captured, failure = None, None
        try:
            captured = self._capture_segments(static, sizes)
        except CaptureError as error:
            failure = str(error)  # not the error itself, which holds on to all the memory of the attempt
        failed = self._world.all_reduce(torch.tensor(float(failure is not None), device=self._world.device))
        if failed > 0 or captured is None:
            raise CaptureError(failure or "another rank cannot")
        return captured

    def _capture_segments(self, static: Inputs, sizes: StaticSizes) -> _CapturedStep:
        """Nothing is executed here. The graphs share a pool: one reads what the one before left in memory."""
        program, segments, pool = self._program(static, sizes), [], torch.cuda.graph_pool_handle()
        values: Values | None = None
        while values is None:
            boundary = None
            with capture_graph(self._exclusive.stream, pool) as graph:
                while values is None and boundary is None:
                    try:
                        sync_point = next(program)
                        boundary = sync_point if self._splits(sync_point) else None
                    except StopIteration as end:
                        values = end.value
            segments.append((graph, boundary))
        return _CapturedStep(static, tuple(segments), values)

    def _splits(self, sync_point: SyncPoint) -> bool:
        return bool(sync_point.tensors) and self._world.rank_group is not None
