"""Fold each eval-mode BatchNorm into the convolution that precedes it."""

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from trainer.acceleration.fx_safety import fake_tensor_of, is_safe_to_move

_TRAINING, _EPS = 5, 7
"""Positions of `training` and `eps` among the eight arguments of batch_norm in a graph traced by torch.compile."""
_BIAS = 2
"""Position of `bias` among the seven arguments of conv2d."""


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
