"""The GPUs this process sees, and how they are set up before first use."""

import os

import torch


def count_visible_gpus() -> int:
    """How many GPUs this process sees. Call it before any other use of CUDA, which reads its settings once."""
    # Streams share hardware queues, 8 by default, and a stream waits for everything ahead of it in its queue: the
    # decoder would wait for a whole training step. 32 is the maximum.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def prepare_gpu(device: torch.device, deterministic: bool = False) -> None:
    """Set the device up before its memory is first used."""
    # CUDA graphs hold on to their memory: without expandable segments, a seventh of it is lost to fragmentation.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not deterministic  # shapes are fixed, so the search pays off at once
