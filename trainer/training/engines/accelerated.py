"""Let accelerate wrap a module in DistributedDataParallel, using the existing process group."""

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shards.errors import ConfigError
from trainer.distributed.world import World

_OTHERS = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def wrap_with_accelerate(module: nn.Module, world: World, find_unused: bool) -> nn.Module:
    """Return the module wrapped in DDP, on the same device; the module itself in a world of one.

    Parameters stay fp32 and the methods apply autocast, so accelerate always gets mixed precision "no", whatever its
    launcher was given. `world` must contain all ranks, since accelerate does not support process subgroups.
    """
    for variable, name in _OTHERS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ConfigError(
                f"accelerate was started with {name}, which is not supported: use its plain multi-GPU mode, or "
                "DeepSpeed ZeRO-1 or ZeRO-2"
            )
    if world.size == 1:
        return module
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=find_unused)
    threads = torch.get_num_threads()
    accelerator = Accelerator(cpu=world.device.type == "cpu", mixed_precision="no", kwargs_handlers=[exchange])
    torch.set_num_threads(threads)  # accelerate changes it if OMP_NUM_THREADS is unset
    seen = (accelerator.num_processes, accelerator.process_index, accelerator.device.type)
    ours = (world.size, world.rank, world.device.type)
    assert seen == ours, f"accelerate sees (ranks, rank, device) {seen}, but the launcher set {ours}"
    with _keep_device():
        wrapped: nn.Module = accelerator.prepare_model(module, device_placement=False)
    assert isinstance(wrapped, DistributedDataParallel), f"accelerate returned a {type(wrapped).__name__}, not DDP"
    return wrapped


@contextlib.contextmanager
def _keep_device() -> Iterator[None]:
    """Keep DDP on the module's device; accelerate would choose GPU local_rank, even if ranks share a GPU."""
    name = "ACCELERATE_BYPASS_DEVICE_MAP"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
