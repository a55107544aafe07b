"""Apply torch.compile to each block of a network; blocks of the same kind share one compilation."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.fx import GraphModule

from trainer.acceleration.compile_cache import use_compile_cache
from trainer.acceleration.fold_batchnorm import fold_batchnorms
from trainer.acceleration.fuse_convs import fuse_convolutions
from trainer.acceleration.narrow_convs import replace_narrow_convolutions

_MOST_VERSIONS = 256
"""Maximum number of compiled versions of one block's code (per shape, mode and width). Beyond the limit, 8 by
default, torch silently falls back to eager execution."""


def rewrite_and_compile(graph: GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
    """A torch.compile backend: fold BatchNorms, fuse or replace convolutions, then compile with inductor."""
    fold_batchnorms(graph)
    fuse_convolutions(graph)
    replace_narrow_convolutions(graph)
    compiled: Callable[..., object] = torch._dynamo.lookup_backend("inductor")(graph, examples)
    return compiled


def compile_blocks(network: nn.Module, backend: str | Callable[..., object] = rewrite_and_compile) -> int:
    """Compile each block in place, which keeps the parameter names; return the number of blocks.

    A block is compiled at its first call. The ten kinds of block in Inception-ResNet-v2 take 80 s together; compiling
    the whole network at once would take 150 s or more and run no faster.
    """
    use_compile_cache()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VERSIONS)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, 16 * _MOST_VERSIONS
    )
    blocks = list(iterate_blocks(network))
    for block in blocks:
        block.compile(dynamic=False, backend=backend)
    return len(blocks)


def iterate_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the child modules that have parameters, descending into containers; every parameter is in exactly one."""
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from iterate_blocks(child)
        elif any(True for _ in child.parameters()):
            yield child
