"""DistributedDataParallel as accelerate prepares it, over the process group that is already there."""

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
    """The module in DDP, on its device; itself in a world of one.

    Parameters stay fp32 and the methods apply autocast, so accelerate gets mixed precision "no", whatever its
    launcher was given. It knows no groups: the world must be the whole one.
    """
    for variable, name in _OTHERS.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ConfigError(
                f"accelerate was started with {name}: start it plainly, or with DeepSpeed ZeRO-1 or ZeRO-2"
            )
    if world.size == 1:
        return module
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=find_unused)
    threads = torch.get_num_threads()
    accelerator = Accelerator(cpu=world.device.type == "cpu", mixed_precision="no", kwargs_handlers=[exchange])
    torch.set_num_threads(threads)  # it sets its own where OMP_NUM_THREADS is unset
    seen = (accelerator.num_processes, accelerator.process_index, accelerator.device.type)
    ours = (world.size, world.rank, world.device.type)
    assert seen == ours, f"accelerate sees (ranks, rank, device) {seen}, and they are {ours}"
    with _keep_device():
        wrapped: nn.Module = accelerator.prepare_model(module, device_placement=False)
    assert isinstance(wrapped, DistributedDataParallel), f"accelerate made {type(wrapped).__name__} of the module"
    return wrapped


@contextlib.contextmanager
def _keep_device() -> Iterator[None]:
    """Keep DDP on the module's device; accelerate would choose GPU local_rank, even where ranks share a GPU."""
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
