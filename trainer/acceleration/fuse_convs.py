"""Convolutions of one pixel that read one tensor, as the heads of parallel branches do, computed as one.

The tensor is read once instead of once a branch, forward and backward, its gradients need no adding up, and one
convolution of 96 channels keeps a GPU busier than three of 32. The numbers are the same but for rounding.
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
"""Bias, stride, padding, dilation and groups, as torch.compile writes them."""


@dataclass(frozen=True)
class _Head:
    """`node` convolves what `read` is by `weight`."""

    node: Node
    read: Node
    weight: Node
    channels: int


def fuse_convolutions(module: GraphModule) -> int:
    """In a graph as torch.compile traces it, autograd not yet in it; returns the number of convolutions gone."""
    groups: dict[tuple[Node, torch.dtype], list[_Head]] = defaultdict(list)
    for node in module.graph.nodes:
        _add_head(groups, node)
    joined = [heads for heads in groups.values() if len(heads) > 1 and _may_be_one(heads)]
    for heads in joined:
        _join(module.graph, heads)
    module.recompile()
    return sum(len(heads) - 1 for heads in joined)


def _add_head(groups: dict[tuple[Node, torch.dtype], list[_Head]], node: Node) -> None:
    """Where it is a convolution of one pixel by a weight given to the graph, for BatchNorm, which only reads it."""
    if node.target is not torch.conv2d or node.kwargs or tuple(node.args[2:]) != _PLAIN:
        return
    read, weight = node.args[:2]
    known = fake_tensor_of(weight)
    if not isinstance(read, Node) or not isinstance(weight, Node) or known is None:
        return
    only_normed = all(user.target is F.batch_norm for user in node.users)
    if weight.op == "placeholder" and known.shape[2:] == (1, 1) and only_normed:
        groups[read, known.dtype].append(_Head(node, read, weight, known.shape[0]))


def _may_be_one(heads: Sequence[_Head]) -> bool:
    return is_safe_to_move(heads[0].node, heads[-1].node, [heads[0].read, *(head.weight for head in heads)])


def _join(graph: Graph, heads: Sequence[_Head]) -> None:
    with graph.inserting_before(heads[0].node):
        weight = graph.call_function(torch.cat, ([head.weight for head in heads],))
        joined = graph.call_function(torch.conv2d, (heads[0].read, weight, *_PLAIN))
        parts = graph.call_function(torch.split, (joined, [head.channels for head in heads], 1))
        for at, head in enumerate(heads):
            head.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for head in heads:
        graph.erase_node(head.node)
