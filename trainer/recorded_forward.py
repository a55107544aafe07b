"""A network's forward in a predict pass, replayed from a CUDA graph: one launch instead of hundreds."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainer.gpu import CannotRecord, OwnStream, capturing

_FIRST_EAGER, _FIRST_EAGER_OF_LARGE = 2, 32
"""Batches that are launched kernel by kernel: cuDNN searches and workspaces are made in these. Recording takes
as long as a few large batches, which keep the GPU busy however they are launched: it pays in long passes only."""
_KEPT_NUMBERS = 8_000_000
"""In a batch whose recording is kept for the next pass; those of larger ones hold much memory."""

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    on: OwnStream
    images: torch.Tensor
    logits: torch.Tensor

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.images.copy_(images)
        self.graph.replay()
        return self.logits


_KEPT: "WeakKeyDictionary[nn.Module, tuple[object, _Recording]]" = WeakKeyDictionary()
"""From pass to pass: weights change where they are."""


class RecordedForward:
    """`forward(images)` of one pass; what it returns is good until the next call."""

    def __init__(self, network: nn.Module, forward: Forward, way: tuple[object, ...]) -> None:
        """forward: the network's, in the mode and precision of the whole pass; way: which names these."""
        self._network, self._forward, self._way = network, forward, way
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
        first = _FIRST_EAGER if images.numel() <= _KEPT_NUMBERS else _FIRST_EAGER_OF_LARGE
        if self._recording is None and self._calls == first:
            self._recording = self._recorded(images)
        self._calls += 1
        return self._forward(images) if self._recording is None else self._recording(images)

    def _recorded(self, images: torch.Tensor) -> _Recording | None:
        held, on = images.clone(), OwnStream(images.device)
        try:
            with capturing(on.stream) as graph:
                logits = self._forward(held)
        except CannotRecord as error:  # a network that looks at its numbers
            print(f"warning: the forward cannot be recorded and runs eagerly ({error})", file=sys.stderr)
            return None
        recording = _Recording(graph, on, held, logits)
        if images.numel() <= _KEPT_NUMBERS:
            _KEPT[self._network] = (self._key, recording)
        return recording
