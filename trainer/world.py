"""Where this process runs: its device, its threads, its place among the ranks."""

import os
from dataclasses import dataclass

import torch

from shards.errors import ConfigError
from trainer.config import ExecutionConfig


@dataclass(frozen=True)
class World:
    """One process of `size`."""

    rank: int
    size: int
    device: torch.device
    threads: int


def join_world(execution: ExecutionConfig) -> World:
    """Set torch up as the recipe's execution keys say."""
    if execution.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("execution.device is cuda, and no GPU is visible here: set it to auto or cpu")
    use_gpu = execution.device == "cuda" or (execution.device == "auto" and torch.cuda.is_available())
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    if execution.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only so
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return World(0, 1, torch.device("cuda", 0) if use_gpu else torch.device("cpu"), torch.get_num_threads())
