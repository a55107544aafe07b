"""Replace convolutions with few channels, as in CIFAR ResNets, by Triton kernels.

cuDNN's kernels are made for wide layers: with 16 channels, and several trainings sharing a GPU, they take almost four
times as long as the kernels used here. Results are equal up to rounding. Weights stay in float32 and are converted
inside the kernels; their gradients are summed in float32.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from trainer.acceleration.rewrite_convs import fake_tensor_of

_INPUTS = (3, 16, 32, 64)
_OUTPUTS = (16, 32, 64)
_STRIDES = ((1, 1), (2, 2))
_MOST_PIXELS = 32 * 32
"""Of one image; with more, cuDNN's kernels are the faster ones."""


@torch.library.custom_op("incv::narrow_conv", mutates_args=())
def narrow_conv(images: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """Convolve with a 1x1 or 3x3 kernel, padded so that stride 1 keeps the size; dtype: that of the products."""
    from trainer.acceleration import narrow_conv_kernels

    return narrow_conv_kernels.forward(images, weight, stride, dtype)


@torch.library.custom_op("incv::narrow_conv_images_grad", mutates_args=())
def _images_grad(grad: Tensor, weight: Tensor, stride: int, height: int, width: int) -> Tensor:
    from trainer.acceleration import narrow_conv_kernels

    return narrow_conv_kernels.images_grad(grad, weight, stride, height, width)


@torch.library.custom_op("incv::narrow_conv_weight_grad", mutates_args=())
def _weight_grad(images: Tensor, grad: Tensor, stride: int, size: int) -> Tensor:
    from trainer.acceleration import narrow_conv_kernels

    return narrow_conv_kernels.weight_grad(images, grad, stride, size)


@narrow_conv.register_fake
def _(images: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    rows, _, height, width = images.shape
    shape = rows, weight.shape[0], -(-height // stride), -(-width // stride)
    return _empty(images, shape, dtype)


@_images_grad.register_fake
def _(grad: Tensor, weight: Tensor, stride: int, height: int, width: int) -> Tensor:
    return _empty(grad, (grad.shape[0], weight.shape[1], height, width), grad.dtype)


@_weight_grad.register_fake
def _(images: Tensor, grad: Tensor, stride: int, size: int) -> Tensor:
    return _empty(images, (grad.shape[1], images.shape[1], size, size), torch.float32)


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def _keep_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    images, weight, ctx.stride, _ = inputs
    ctx.save_for_backward(images, weight)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    images, weight = ctx.saved_tensors
    of_images = of_weight = None
    if ctx.needs_input_grad[0]:
        of_images = _images_grad(grad, weight, ctx.stride, *images.shape[2:]).to(images.dtype)
    if ctx.needs_input_grad[1]:
        of_weight = _weight_grad(images, grad, ctx.stride, weight.shape[2]).to(weight.dtype)
    return of_images, of_weight, None, None


narrow_conv.register_autograd(_backward, setup_context=_keep_inputs)


def replace_narrow_convolutions(module: GraphModule, device: str = "cuda") -> int:
    """Replace convolutions in a graph traced by torch.compile, before autograd; return their number."""
    found = [node for node in module.graph.nodes if _is_narrow(node, device)]
    for node in found:
        images, weight, _, stride, *_ = node.args
        result = fake_tensor_of(node)
        assert result is not None
        with module.graph.inserting_before(node):
            new = module.graph.call_function(
                torch.ops.incv.narrow_conv.default, (images, weight, stride[0], result.dtype)
            )
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
    module.recompile()
    return len(found)


def _is_narrow(node: Node, device: str) -> bool:
    """Whether the kernels compute this convolution: few channels, 16-bit products; no bias, dilation or groups."""
    if node.target is not torch.conv2d or node.kwargs or len(node.args) != 7:
        return False
    images, weight, result = (fake_tensor_of(each) for each in (*node.args[:2], node))
    if images is None or weight is None or result is None:
        return False
    bias, stride, padding, dilation, groups = node.args[2:]
    outputs, inputs, *size = weight.shape
    return bool(
        images.device.type == device
        and images.shape[2] * images.shape[3] <= _MOST_PIXELS
        and result.dtype in (torch.bfloat16, torch.float16)
        and (inputs in _INPUTS and (inputs in _OUTPUTS or not images.requires_grad))
        and outputs in _OUTPUTS
        and size in ([1, 1], [3, 3])
        and stride in _STRIDES
        and padding == (size[0] // 2, size[0] // 2)
        and (bias, dilation, groups) == (None, (1, 1), 1)
    )
