"""Whether an operation in a graph of torch.compile may be moved: writes in place and switches are still in it."""

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

_READERS = frozenset({torch.conv2d, torch.cat, operator.getitem})
"""Functions that write into none of their arguments."""


def fake_tensor_of(node: object) -> torch.Tensor | None:
    """A tensor without numbers: what torch.compile knows of a node's result."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_safe_to_move(first: Node, last: Node, tensors: Iterable[Node]) -> bool:
    """Whether nothing from `first` up to `last` could write into these, or switch gradients or mixed precision."""
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
    """None: not known, so it could be anywhere."""
    value = fake_tensor_of(node)
    return None if value is None else value.untyped_storage()._cdata
