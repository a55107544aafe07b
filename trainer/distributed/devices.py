"""Count the visible GPUs and configure them before first use."""

import os

import torch


def count_visible_gpus() -> int:
    """Return the number of visible GPUs. Call this before any other use of CUDA, which reads its settings once."""
    # Streams share hardware queues (8 by default), and a stream waits for everything ahead of it in its queue: the
    # decoder would wait for a whole training step. 32 is the maximum.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def prepare_gpu(device: torch.device, deterministic: bool = False) -> None:
    """Configure the allocator and cuDNN; call it before the first allocation on the device."""
    # CUDA graphs keep their memory pools: without expandable segments, fragmentation wastes a seventh of the memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = not deterministic  # shapes are fixed, so autotuning pays off at once


def describe_hardware(device: torch.device, ranks: int) -> str:
    """Return the hardware of a run in words, as `1 x NVIDIA H200, 16 cores`; the cores are those of this machine."""
    cores = f"{os.cpu_count()} cores"
    return f"{ranks} x {torch.cuda.get_device_name(device)}, {cores}" if device.type == "cuda" else f"CPU, {cores}"
