"""Many small tensors as one: to be added up, selected or copied by one operation instead of hundreds."""

from collections.abc import Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their numbers end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of `flat`, in the shapes of `like`: views, in the type of `whole`."""
    parts = whole.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, whatever its type: uint8 [bytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def flatten_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Those of all of them, end to end."""
    return flatten([as_bytes(tensor) for tensor in tensors])


def unflatten_bytes(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pieces of `flat_bytes`, in the shapes and types of `like`: copies, since a view may begin anywhere."""
    parts = whole.split([tensor.nbytes for tensor in like])
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
