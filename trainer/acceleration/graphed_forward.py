"""A network's forward in a predict pass, replayed from a CUDA graph: one launch instead of hundreds."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainer.acceleration.streams import CaptureError, ExclusiveStream, capture_graph

_FIRST_EAGER = 2
"""Batches that are launched kernel by kernel: cuDNN searches and workspaces are made in these."""
_LARGE, _LARGE_WORTH_RECORDING = 8_000_000, 32
"""Numbers in a batch that keeps the GPU busy however it is launched, and how many such batches a pass has for which
recording pays, which takes as long as one or two of them."""
_SPARED = 4
"""A recording is kept for the next pass where the GPU has so many times its memory left."""

Forward = Callable[[torch.Tensor], torch.Tensor]


@cache
def predict_stream(device: torch.device) -> ExclusiveStream:
    """All predict passes of a GPU follow upon each other on this one; what is recorded for them is recorded on it."""
    return ExclusiveStream(device)


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    images: torch.Tensor
    logits: torch.Tensor

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.images.copy_(images)
        self.graph.replay()
        return self.logits


_KEPT: "WeakKeyDictionary[nn.Module, tuple[object, _Recording]]" = WeakKeyDictionary()
"""From pass to pass: weights change where they are."""


def clear_graph_cache() -> None:
    """Let go of what was kept; the next pass is one like the first."""
    _KEPT.clear()


class GraphedForward:
    """`forward(images)` of one pass; what it returns is good until the next call."""

    def __init__(self, network: nn.Module, forward: Forward, way: tuple[object, ...], batches: int) -> None:
        """forward: the network's, in the mode and precision of the whole pass; way: which names these."""
        self._network, self._forward, self._way, self._batches = network, forward, way, batches
        self._recording: _Recording | None = None
        self._key: object = None
        self._calls = 0
        self._weights = hash(tuple(parameter.data_ptr() for parameter in network.parameters()))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if not images.is_cuda:
            return self._forward(images)
        key = (images.shape, images.dtype, self._way, self._weights)
        if key != self._key:
            known, recording = _KEPT.get(self._network, (None, None))
            self._key, self._calls = key, 0
            self._recording = recording if known == key else None
        pays = images.numel() <= _LARGE or self._batches >= _LARGE_WORTH_RECORDING
        if self._recording is None and pays and self._calls == _FIRST_EAGER:
            self._recording = self._recorded(images)
        self._calls += 1
        return self._forward(images) if self._recording is None else self._recording(images)

    def _recorded(self, images: torch.Tensor) -> _Recording | None:
        held = images.clone()
        try:
            with capture_graph(predict_stream(images.device).stream) as graph:
                before = torch.cuda.memory_reserved(images.device)
                logits = self._forward(held)
                memory = torch.cuda.memory_reserved(images.device) - before
        except CaptureError as error:
            print(f"warning: the forward cannot be recorded and runs eagerly ({error})", file=sys.stderr)
            return None
        recording = _Recording(graph, held, logits)
        left, _ = torch.cuda.mem_get_info(images.device)
        if left >= _SPARED * memory:
            _KEPT[self._network] = (self._key, recording)
        return recording
