"""Narrow convolutions in Triton's interpreter, on a CPU, against torch's own; prints the errors as JSON.

Run as `python -m tests.support.interpreted_convs`, with TRITON_INTERPRET=1 in the environment.
"""

import copy
import json

import torch
from torch import nn

from tests.support.same_numbers import rewritten
from trainer.acceleration.narrow_convs import narrow_conv, replace_narrow_convolutions
from trainer.models.cifar_resnets import BasicBlock

CASES = [  # inputs, outputs, size of the kernel, stride, height, width
    (16, 16, 3, 1, 6, 5),
    (3, 16, 3, 1, 4, 4),
    (16, 32, 3, 2, 6, 6),
    (32, 16, 3, 2, 5, 7),
    (16, 32, 1, 2, 7, 5),
    (64, 16, 1, 1, 3, 4),
]


def errors_of(case: tuple[int, ...]) -> list[float]:
    """Greatest differences of the result and of the gradients, relative to the greatest value."""
    inputs, outputs, size, stride, height, width = case
    images = torch.randn(3, inputs, height, width, requires_grad=inputs != 3)
    weight = torch.randn(outputs, inputs, size, size, requires_grad=True)
    read = [images, weight] if images.requires_grad else [weight]
    ours = narrow_conv(images, weight, stride, torch.float32)
    theirs = torch.conv2d(images, weight, None, stride, size // 2)
    grad = torch.randn_like(theirs)
    pairs = [(ours, theirs)]
    pairs += zip(torch.autograd.grad(ours, read, grad), torch.autograd.grad(theirs, read, grad), strict=True)
    return [relative_error(*pair) for pair in pairs]


def block_errors() -> dict[str, object]:
    """A residual block under autocast, compiled with the replacement, against itself uncompiled."""
    plain = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1))
    fast = copy.deepcopy(plain)
    found = rewritten(fast, lambda graph: replace_narrow_convolutions(graph, "cpu"))
    images, results = torch.randn(2, 16, 8, 8), []
    for network in (plain, fast):
        given = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            result = network(given)
        result.float().square().mean().backward()
        results.append([result, given.grad, *(each.grad for each in network.parameters())])
    return {"replaced": found, "errors": [relative_error(*pair) for pair in zip(*results, strict=True)]}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def main() -> None:
    torch.manual_seed(0)
    found = {"convolutions": [errors_of(case) for case in CASES], "block": block_errors()}
    weight = torch.randn(16, 16, 3, 3, requires_grad=True)
    torch.library.opcheck(narrow_conv, (torch.randn(2, 16, 4, 4, requires_grad=True), weight, 1, torch.float32))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
