"""torch.compile by repeated block: the blocks of one kind share one compilation."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.fx import GraphModule

from trainer.acceleration.compile_cache import use_compile_cache
from trainer.acceleration.fold_batchnorm import fold_batchnorms
from trainer.acceleration.fuse_convs import fuse_convolutions

_MOST_VERSIONS = 256
"""Of one block's code: shapes, modes and widths. Torch gives up after 8 and silently computes eagerly."""


def rewrite_and_compile(graph: GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
    """A backend of torch.compile: its own, of a graph that does the same with less."""
    fold_batchnorms(graph)
    fuse_convolutions(graph)
    made: Callable[..., object] = lookup_backend("inductor")(graph, examples)
    return made


def compile_blocks(network: nn.Module, backend: str | Callable[..., object] = rewrite_and_compile) -> int:
    """Compile each block in place, names of weights unchanged; returns the number of blocks.

    A block is compiled when it is first called: 80 s for the ten kinds of Inception-ResNet-v2, where the network as a
    whole takes 150 s or more, and is no faster.
    """
    use_compile_cache()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_VERSIONS)
    torch._dynamo.config.accumulated_recompile_limit = max(
        torch._dynamo.config.accumulated_recompile_limit, 16 * _MOST_VERSIONS
    )
    blocks = list(blocks_of(network))
    for block in blocks:
        block.compile(dynamic=False, backend=backend)
    return len(blocks)


def blocks_of(network: nn.Module) -> Iterator[nn.Module]:
    """The parts of a network, containers opened, that hold parameters; each parameter of those in exactly one."""
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from blocks_of(child)
        elif any(True for _ in child.parameters()):
            yield child
