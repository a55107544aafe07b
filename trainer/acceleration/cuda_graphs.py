"""Run a training step eagerly, or capture it in CUDA graphs and replay them.

A step is a generator with fixed shapes and no host-device sync. It yields a SyncPoint wherever the ranks must
all-reduce tensors. The same generator can therefore run eagerly, as one graph on a single rank, or as several graphs
on multiple ranks, with the all-reduces as ordinary calls between the replays.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from trainer.acceleration.streams import CaptureError, ExclusiveStream, capture_graph
from trainer.distributed.world import World

_WARMUP_STEPS = 3  # cover cuDNN autotuning, compilation and lazy allocations

Inputs = Mapping[str, torch.Tensor]
Values = Mapping[str, torch.Tensor]
StaticSizes = tuple[int, ...]
"""Sizes that a step depends on, other than its input shapes."""


@dataclass(frozen=True)
class SyncPoint:
    """A point inside a step where the ranks all-reduce (sum) `tensors` in place."""

    tensors: tuple[torch.Tensor, ...]


StepProgram = Generator[SyncPoint, None, Values]


def run_eagerly(program: StepProgram, world: World) -> Values:
    """Run a step to completion without CUDA graphs, and return its values."""
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
    """The CUDA graphs of one step, in replay order; each except the last is followed by its sync point."""

    inputs: Inputs
    """Static input tensors of the graphs; each step copies its inputs into them."""
    segments: tuple[tuple[torch.cuda.CUDAGraph, SyncPoint | None], ...]
    values: Values
    """Static output tensors of the graphs; the next replay overwrites them."""
    copied: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """The tensor, and its version, that was last copied into each input."""

    def has_changed(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether an input must be copied: not if it is the tensor of the last step, and unchanged."""
        now = tensor, tensor._version
        before, self.copied[name] = self.copied.get(name), now
        return before is None or before[0] is not tensor or before[1] != now[1]


class GraphedStep:
    """Captures a step when its shapes change, then replays it; keeps one capture only, as old shapes never recur."""

    def __init__(
        self,
        program: Callable[[Inputs, StaticSizes], StepProgram],
        world: World,
        without_effects: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """without_effects: context in which steps leave all state unchanged; used for warm-up and capture."""
        self._program, self._world, self._without_effects = program, world, without_effects
        # Captured kernels keep the stream's high priority and so run before the decoder's kernels.
        self._exclusive = ExclusiveStream(world.device)
        self._known: tuple[object, _CapturedStep] | None = None

    def __call__(self, inputs: Inputs, sizes: StaticSizes) -> Values:
        key = (sizes, tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if self._known is None or self._known[0] != key:
            self._known = None  # free the old graphs first: the new ones need as much memory
            self._known = key, self._capture(inputs, sizes)
        captured = self._known[1]
        for name, tensor in inputs.items():
            if captured.has_changed(name, tensor):
                captured.inputs[name].copy_(tensor, non_blocking=True)
        for graph, sync_point in captured.segments:
            graph.replay()
            if sync_point is not None:
                _all_reduce(sync_point, self._world)
        return captured.values

    def _capture(self, inputs: Inputs, sizes: StaticSizes) -> _CapturedStep:
        """Run warm-up steps on the capture stream, then capture the step."""
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
        """Capture on all ranks or on none: a rank that captures issues more all-reduces than an eager rank."""
        captured, failure = None, None
        try:
            captured = self._capture_segments(static, sizes)
        except CaptureError as error:
            failure = str(error)  # not the error itself: its traceback would keep the attempt's memory alive
        failed = self._world.all_reduce(torch.tensor(float(failure is not None), device=self._world.device))
        if failed > 0 or captured is None:
            raise CaptureError(failure or "capture failed on another rank")
        return captured

    def _capture_segments(self, static: Inputs, sizes: StaticSizes) -> _CapturedStep:
        """Capture the step as one graph per segment between sync points, without executing it.

        The graphs share a memory pool, because each reads tensors that the previous ones wrote.
        """
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
