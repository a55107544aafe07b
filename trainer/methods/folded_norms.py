"""BatchNorm that only applies its statistics, as in a predict pass, made part of the convolution before it."""

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

_EPS, _TRAINING, _MOST = 7, 5, 8
"""Places among the arguments of batch_norm, and their number, as torch.compile writes them."""


def fold_norms(module: GraphModule) -> int:
    """In a graph as torch.compile traces it; returns the number of BatchNorms gone.

    Weights are scaled anew in each pass, beside their cast to bf16: they change between passes, and are small.
    """
    found = [node for node in module.graph.nodes if _folds(node)]
    for node in found:
        _fold(module, node)
    module.recompile()
    return len(found)


def _folds(node: Node) -> bool:
    if node.target is not F.batch_norm or node.kwargs or len(node.args) != _MOST or node.args[_TRAINING] is not False:
        return False
    convolution, *given = node.args[:_TRAINING]
    return (
        isinstance(convolution, Node)
        and convolution.target is torch.conv2d
        and not convolution.kwargs
        and len(convolution.args) == 7
        and convolution.args[2] is None
        and list(convolution.users) == [node]
        and isinstance(node.meta.get("example_value"), torch.Tensor)
        and all(isinstance(each, Node) and each.op == "placeholder" for each in given)
    )


def _fold(module: GraphModule, node: Node) -> None:
    convolution, mean, variance, weight, bias = node.args[:_TRAINING]
    assert isinstance(convolution, Node)
    images, kernel, _, *form = convolution.args
    call = module.graph.call_function
    with module.graph.inserting_before(node):
        scale = call(torch.mul, (weight, call(torch.rsqrt, (call(torch.add, (variance, node.args[_EPS])),))))
        offset = call(torch.sub, (bias, call(torch.mul, (mean, scale))))
        scaled = call(torch.mul, (kernel, call(torch.reshape, (scale, (-1, 1, 1, 1)))))
        result = call(torch.conv2d, (images, scaled, None, *form))
        shifted = call(torch.add, (result, call(torch.reshape, (offset, (1, -1, 1, 1)))))
        normed = call(torch.ops.aten.to.dtype, (shifted, node.meta["example_value"].dtype))
    node.replace_all_uses_with(normed)
    module.graph.erase_node(node)
    module.graph.erase_node(convolution)
