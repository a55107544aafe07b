"""CUDA streams that nobody else uses: torch hands the same 32 out again and again."""

from weakref import WeakSet

import torch

_DRAWS = 64  # twice what torch has of a priority
_LIVE: "WeakSet[torch.cuda.Stream]" = WeakSet()


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority that is no other living one of these, as long as there are any.

    Graphs remember the scratch memory of cuBLAS, which belongs to the stream they were recorded on: two graphs of one
    stream that are replayed side by side would write into each other's.
    """
    for _ in range(_DRAWS):
        stream = torch.cuda.Stream(device, priority=-1)
        if stream not in _LIVE:
            break
    _LIVE.add(stream)
    return stream
