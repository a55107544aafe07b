"""Mixed precision: the autocast context, and the type in which images are loaded."""

from contextlib import AbstractContextManager

import torch

from trainer.config.section import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    """Return an autocast context with no weight cache: a cast captured in one CUDA graph is invalid in another."""
    return torch.autocast(device.type, _AUTOCAST.get(precision), enabled=precision in _AUTOCAST, cache_enabled=False)


def image_type(precision: Precision) -> torch.dtype:
    """Return the dtype in which to load images: the one that autocast would cast them to in the first layer."""
    return _AUTOCAST.get(precision, torch.float32)
