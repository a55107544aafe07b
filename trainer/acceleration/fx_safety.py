"""Check whether an operation can be moved safely in a torch.compile graph, past in-place writes and mode switches."""

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

_READERS = frozenset({torch.conv2d, torch.cat, operator.getitem})
"""Functions that modify none of their arguments."""


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
