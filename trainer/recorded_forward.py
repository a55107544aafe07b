"""A network's eval-mode forward, replayed from a CUDA graph where launching its kernels would take longer."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

_REHEARSALS = 2
_MOST_PIXELS = 8_000_000
"""Of a batch that is worth recording: kernels on more run longer than their launch, and would hold much memory."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    images: torch.Tensor
    logits: torch.Tensor


_RECORDINGS: "WeakKeyDictionary[nn.Module, dict[object, _Recording]]" = WeakKeyDictionary()
"""Kept from pass to pass: weights change where they are."""


def logits_of(
    network: nn.Module, images: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`forward(images)`; what it returns may be overwritten by the next call for this network.

    forward: the network's, in the mode and precision of the whole pass.
    """
    if not images.is_cuda or images.numel() > _MOST_PIXELS:
        return forward(images)
    known = _RECORDINGS.setdefault(network, {})
    weights = next(network.parameters(), images)
    key = (images.shape, images.dtype, weights.data_ptr(), torch.get_autocast_dtype("cuda"))
    if key not in known:
        known.clear()
        known[key] = _recorded(images, forward)
    recording = known[key]
    recording.images.copy_(images)
    recording.graph.replay()
    return recording.logits


def _recorded(images: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]) -> _Recording:
    held, stream, graph = images.clone(), torch.cuda.Stream(images.device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_REHEARSALS):
            forward(held)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        logits = forward(held)
    return _Recording(graph, held, logits)
