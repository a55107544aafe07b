"""Pack many small tensors into one flat buffer, so that one operation sums, selects or copies them all."""

from collections.abc import Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors: [numel]."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `flatten`: views of `flat` in the shapes of `like`, with the dtype of `flat`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the raw bytes of a tensor of any dtype: uint8 [nbytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def flatten_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the raw bytes of all tensors: uint8 [nbytes]."""
    return flatten([as_bytes(tensor) for tensor in tensors])


def unflatten_bytes(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `flatten_bytes`: copies in the shapes and dtypes of `like`, not views, as a part may be unaligned."""
    parts = flat.split([tensor.nbytes for tensor in like])
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
