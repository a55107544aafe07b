"""Many small tensors as one: to be added up, selected or copied by one operation instead of hundreds."""

from collections.abc import Sequence

import torch


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their numbers end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of `flat`, in the shapes of `like`: views, in the type of `whole`."""
    parts = whole.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
