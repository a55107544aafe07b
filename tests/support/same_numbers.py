"""Compare two forms of one module."""

from collections.abc import Callable

import torch
from torch import nn
from torch.fx import GraphModule


def rewritten(module: nn.Module, rewrite: Callable[[GraphModule], int]) -> list[int]:
    """Its graphs are rewritten and run without a compiler; returns what `rewrite` does, once the module has run."""
    returned: list[int] = []

    def run(graph, examples):
        returned.append(rewrite(graph))
        return graph.forward

    torch._dynamo.reset()
    module.compile(backend=run, dynamic=False)
    return returned


def assert_same(
    module: nn.Module, other: nn.Module, shape: tuple[int, ...], within: float = 1e-12, device: str = "cpu"
) -> None:
    """Of what two modules in fp64 make of images: results, gradients of images and of weights, statistics."""
    outcomes = []
    for each in (module, other):
        torch.manual_seed(5)  # dropout draws the same
        generator = torch.Generator().manual_seed(7)
        images = torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        result = each(images)
        shares = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(device)
        (result * shares).sum().backward()
        outcomes.append([result.detach(), images.grad, *(p.grad for p in each.parameters()), *each.buffers()])
    torch.testing.assert_close(*outcomes, rtol=0, atol=within)
