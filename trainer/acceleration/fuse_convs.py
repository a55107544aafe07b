"""Fuse 1x1 convolutions that read the same tensor, such as the first layers of parallel branches.

In both forward and backward, the tensor is read once instead of once per branch, and the gradients of the branches
need not be summed. One convolution with 96 channels also uses a GPU better than three with 32. Results are equal up
to rounding.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from trainer.acceleration.fx_safety import fake_tensor_of, is_safe_to_move

_PLAIN = (None, (1, 1), (0, 0), (1, 1), 1)
"""Bias, stride, padding, dilation and groups of a plain 1x1 convolution, as traced by torch.compile."""


@dataclass(frozen=True)
class _Head:
    """A convolution that may be fused: `node` convolves the tensor `read` with `weight`."""

    node: Node
    read: Node
    weight: Node
    channels: int


def fuse_convolutions(module: GraphModule) -> int:
    """Fuse convolutions in a graph traced by torch.compile, before autograd; return the number removed."""
    groups: dict[tuple[Node, torch.dtype], list[_Head]] = defaultdict(list)
    for node in module.graph.nodes:
        _add_head(groups, node)
    fused = [heads for heads in groups.values() if len(heads) > 1 and _can_fuse(heads)]
    for heads in fused:
        _fuse(module.graph, heads)
    module.recompile()
    return sum(len(heads) - 1 for heads in fused)


def _add_head(groups: dict[tuple[Node, torch.dtype], list[_Head]], node: Node) -> None:
    """Add `node` to its group if it can be fused.

    It must be a 1x1 convolution whose weight is a graph input and whose output goes to BatchNorms only.
    """
    if node.target is not torch.conv2d or node.kwargs or tuple(node.args[2:]) != _PLAIN:
        return
    read, weight = node.args[:2]
    known = fake_tensor_of(weight)
    if not isinstance(read, Node) or not isinstance(weight, Node) or known is None:
        return
    only_normed = all(user.target is F.batch_norm for user in node.users)
    if weight.op == "placeholder" and known.shape[2:] == (1, 1) and only_normed:
        groups[read, known.dtype].append(_Head(node, read, weight, known.shape[0]))


def _can_fuse(heads: Sequence[_Head]) -> bool:
    return is_safe_to_move(heads[0].node, heads[-1].node, [heads[0].read, *(head.weight for head in heads)])


def _fuse(graph: Graph, heads: Sequence[_Head]) -> None:
    with graph.inserting_before(heads[0].node):
        weight = graph.call_function(torch.cat, ([head.weight for head in heads],))
        fused = graph.call_function(torch.conv2d, (heads[0].read, weight, *_PLAIN))
        parts = graph.call_function(torch.split, (fused, [head.channels for head in heads], 1))
        for at, head in enumerate(heads):
            head.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for head in heads:
        graph.erase_node(head.node)
