"""Rewrite convolutions in a torch.compile graph; results are equal up to rounding.

`fuse_convolutions` joins 1x1 convolutions that read the same tensor, such as the first layers of parallel branches:
the tensor is read once instead of once per branch, the gradients of the branches need not be summed, and one
convolution with 96 channels uses a GPU better than three with 32. `fold_batchnorms` folds each eval-mode BatchNorm
into the convolution that precedes it.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

_PLAIN = (None, (1, 1), (0, 0), (1, 1), 1)
"""Bias, stride, padding, dilation and groups of a plain 1x1 convolution, as traced by torch.compile."""
_TRAINING, _EPS = 5, 7
"""Positions of `training` and `eps` among the eight arguments of batch_norm in a graph traced by torch.compile."""
_BIAS = 2
"""Position of `bias` among the seven arguments of conv2d."""
_READERS = frozenset({torch.conv2d, torch.cat, operator.getitem})
"""Functions that modify none of their arguments."""


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
    fused = [
        heads
        for (read, _), heads in groups.items()
        if len(heads) > 1 and is_safe_to_move(heads[0].node, heads[-1].node, [read, *(head.weight for head in heads)])
    ]
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


def _fuse(graph: Graph, heads: Sequence[_Head]) -> None:
    with graph.inserting_before(heads[0].node):
        weight = graph.call_function(torch.cat, ([head.weight for head in heads],))
        fused = graph.call_function(torch.conv2d, (heads[0].read, weight, *_PLAIN))
        parts = graph.call_function(torch.split, (fused, [head.channels for head in heads], 1))
        for at, head in enumerate(heads):
            head.node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, at)))
    for head in heads:
        graph.erase_node(head.node)


def fold_batchnorms(module: GraphModule) -> int:
    """Fold BatchNorms in a graph traced by torch.compile; return the number removed.

    The convolution weights change between passes, so they are scaled in every forward. That is cheap, since they are
    small and cast to bf16 anyway.
    """
    found = [node for node in module.graph.nodes if _can_fold(node)]
    for node in found:
        _fold(module, node)
    module.recompile()
    return len(found)


def _can_fold(node: Node) -> bool:
    if node.target is not F.batch_norm or node.kwargs or len(node.args) != 8 or node.args[_TRAINING] is not False:
        return False
    convolution, *given = node.args[:_TRAINING]
    return (
        fake_tensor_of(node) is not None
        and all(fake_tensor_of(each) is not None for each in given)
        and isinstance(convolution, Node)
        and _has_no_bias(convolution)
        and list(convolution.users) == [node]
        and is_safe_to_move(convolution, node, convolution.all_input_nodes)
    )


def _has_no_bias(node: Node) -> bool:
    return node.target is torch.conv2d and not node.kwargs and len(node.args) == 7 and node.args[_BIAS] is None


def _fold(module: GraphModule, node: Node) -> None:
    convolution, mean, variance, weight, bias = node.args[:_TRAINING]
    assert isinstance(convolution, Node)
    images, kernel, _, *form = convolution.args
    known, call = fake_tensor_of(node), module.graph.call_function
    assert known is not None
    with module.graph.inserting_before(node):
        scale = call(torch.mul, (weight, call(torch.rsqrt, (call(torch.add, (variance, node.args[_EPS])),))))
        offset = call(torch.sub, (bias, call(torch.mul, (mean, scale))))
        scaled = call(torch.mul, (kernel, call(torch.reshape, (scale, (-1, 1, 1, 1)))))
        result = call(torch.conv2d, (images, scaled, None, *form))
        shifted = call(torch.add, (result, call(torch.reshape, (offset, (1, -1, 1, 1)))))
        normed = call(torch.ops.aten.to.dtype, (shifted, known.dtype))
    normed.meta.update(node.meta)
    node.replace_all_uses_with(normed)
    module.graph.erase_node(node)
    module.graph.erase_node(convolution)


def fake_tensor_of(node: object) -> torch.Tensor | None:
    """Return the fake tensor (shape, dtype and storage) that torch.compile recorded for a node's result, or None."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_safe_to_move(first: Node, last: Node, tensors: Iterable[Node]) -> bool:
    """Whether no node from `first` up to `last` may write to `tensors`, or switch gradient mode or autocast."""
    memory = {_storage(tensor) for tensor in tensors} | {None}
    node = first
    while node is not last:
        if node.op == "call_function" and node.is_impure():
            return False
        if node.target not in _READERS and any(_storage(argument) in memory for argument in node.all_input_nodes):
            return False
        node = node.next
    return True


def _storage(node: Node) -> int | None:
    """Identify the storage of a node's result; None if unknown, in which case it may alias any tensor."""
    value = fake_tensor_of(node)
    return None if value is None else value.untyped_storage()._cdata
