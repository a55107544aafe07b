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

_PLAIN = (None, (1, 1), (0, 0), (1, 1), 1)
"""Bias, stride, padding, dilation and groups, as torch.compile writes them."""


@dataclass(frozen=True)
class _Head:
    """`node` convolves what `read` is by `weight`."""

    node: Node
    read: Node
    weight: Node
    channels: int


def join_convolutions(module: GraphModule) -> int:
    """In a graph as torch.compile traces it, autograd not yet in it; returns the number of convolutions gone."""
    groups: dict[tuple[Node, torch.dtype], list[_Head]] = defaultdict(list)
    for node in module.graph.nodes:
        _add_head(groups, node)
    gone = 0
    for (read, _), heads in groups.items():
        if len(heads) > 1 and not _may_change(read, _between(module.graph, heads)):
            _join(module.graph, heads)
            gone += len(heads) - 1
    module.recompile()
    return gone


def _add_head(groups: dict[tuple[Node, torch.dtype], list[_Head]], node: Node) -> None:
    """Where it is a convolution of one pixel by a weight given to the graph, for BatchNorm, which only reads it."""
    if node.target is not torch.conv2d or node.kwargs or tuple(node.args[2:]) != _PLAIN:
        return
    read, weight = node.args[:2]
    if not isinstance(read, Node) or not isinstance(weight, Node) or weight.op != "placeholder":
        return
    known = _value(weight)
    if _value(read) is None or known is None or known.shape[2:] != (1, 1):
        return
    if all(user.target is F.batch_norm for user in node.users):
        groups[read, known.dtype].append(_Head(node, read, weight, known.shape[0]))


def _value(node: Node) -> torch.Tensor | None:
    """A tensor without numbers: what torch.compile knows of a node's result."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


def _between(graph: Graph, heads: Sequence[_Head]) -> list[Node]:
    """From the first head to the last."""
    nodes = list(graph.nodes)
    return nodes[nodes.index(heads[0].node) : nodes.index(heads[-1].node)]


def _may_change(read: Node, nodes: Sequence[Node]) -> bool:
    """Whether one of them could write where `read` is: anything but a convolution that is given its memory."""
    own = _storage(read)
    return any(
        node.target is not torch.conv2d and any(_storage(argument) == own for argument in node.all_input_nodes)
        for node in nodes
    )


def _storage(node: Node) -> int | None:
    value = _value(node)
    return None if value is None else value.untyped_storage()._cdata


def _join(graph: Graph, heads: Sequence[_Head]) -> None:
    with graph.inserting_before(heads[0].node):
        weight = graph.call_function(torch.cat, ([head.weight for head in heads],))
        joined = graph.call_function(torch.conv2d, (heads[0].read, weight, *_PLAIN))
        parts = graph.call_function(torch.split, (joined, [head.channels for head in heads], 1))
        for at, head in enumerate(heads):
            head.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for head in heads:
        graph.erase_node(head.node)
