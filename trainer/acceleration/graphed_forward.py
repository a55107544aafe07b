"""Replay the forward of a predict pass from a CUDA graph: one launch instead of hundreds."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainer.acceleration.streams import CaptureError, ExclusiveStream, capture_graph

_log = logging.getLogger(__name__)

_WARMUP_BATCHES = 2
"""Eager batches before the capture, in which cuDNN autotunes and allocates its workspaces."""
_LARGE, _LARGE_WORTH_CAPTURE = 8_000_000, 32
"""A batch with more than _LARGE elements keeps the GPU busy even when launched eagerly. A capture takes as long as
one or two such batches, so it pays off only in a pass of at least _LARGE_WORTH_CAPTURE batches."""
_SPARED = 4
"""Keep a graph for the next pass only if the GPU's free memory is at least this many times the graph's."""

Outputs = tuple[torch.Tensor, ...]
Forward = Callable[[torch.Tensor], Outputs]


@cache
def predict_stream(device: torch.device) -> ExclusiveStream:
    """Return the GPU's stream for predict passes: they run on it in sequence, and their graphs are captured on it."""
    return ExclusiveStream(device)


@dataclass(frozen=True)
class _CapturedForward:
    """A CUDA graph of a forward pass, with its static input and output tensors."""

    graph: torch.cuda.CUDAGraph
    images: torch.Tensor
    outputs: Outputs

    def __call__(self, images: torch.Tensor) -> Outputs:
        self.images.copy_(images)
        self.graph.replay()
        return self.outputs


_KEPT: "WeakKeyDictionary[nn.Module, dict[object, tuple[object, _CapturedForward]]]" = WeakKeyDictionary()
"""Graphs that are reused in later passes, one for each mode of a network, since passes with and without features may
alternate; they stay valid because weights change in place."""


def clear_graph_cache() -> None:
    """Drop the cached graphs; the next pass captures new ones."""
    _KEPT.clear()


class GraphedForward:
    """A network's forward for one predict pass, graphed if that pays off; each call overwrites the last result."""

    def __init__(self, network: nn.Module, forward: Forward, mode: tuple[object, ...], batches: int) -> None:
        """forward: runs the network in the mode and precision of the pass; mode: identifies both."""
        self._network, self._forward, self._mode, self._batches = network, forward, mode, batches
        self._captured: _CapturedForward | None = None
        self._key: object = None
        self._calls = 0
        self._weights = hash(tuple(parameter.data_ptr() for parameter in network.parameters()))

    def __call__(self, images: torch.Tensor) -> Outputs:
        if not images.is_cuda:
            return self._forward(images)
        key = (images.shape, images.dtype, self._weights)
        if key != self._key:
            known, captured = _KEPT.get(self._network, {}).get(self._mode, (None, None))
            self._key, self._calls = key, 0
            self._captured = captured if known == key else None
        pays = images.numel() <= _LARGE or self._batches >= _LARGE_WORTH_CAPTURE
        if self._captured is None and pays and self._calls == _WARMUP_BATCHES:
            self._captured = self._capture(images)
        self._calls += 1
        return self._forward(images) if self._captured is None else self._captured(images)

    def _capture(self, images: torch.Tensor) -> _CapturedForward | None:
        static = images.clone()
        try:
            with capture_graph(predict_stream(images.device).stream) as graph:
                before = torch.cuda.memory_reserved(images.device)
                outputs = self._forward(static)
                memory = torch.cuda.memory_reserved(images.device) - before
        except CaptureError as error:
            _log.warning("the forward cannot be captured in a CUDA graph and runs eagerly (%s)", error)
            return None
        captured = _CapturedForward(graph, static, outputs)
        left, _ = torch.cuda.mem_get_info(images.device)
        if left >= _SPARED * memory:
            _KEPT.setdefault(self._network, {})[self._mode] = (self._key, captured)
        return captured
