"""Triton kernels for convolutions with few channels, in channels-last layout (implicit matrix products).

A pixel is a row of a matrix, and a channel a column. Each position of the kernel, a tap, adds the product of the
shifted pixels with the tap's [inputs, outputs] weights. Sums are in float32, and the order of the terms is fixed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
_CHUNKS = 128
"""Maximum number of parts that the pixels are divided into for a weight gradient; their sums are added at the end."""


@triton.jit
def _forward_kernel(
    images,
    weight,
    result,
    pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """result[pixel] = sum of images[pixel shifted by tap] @ weight[tap]. PADDED: INPUTS rounded up to 16 or more."""
    out_height: tl.constexpr = (HEIGHT + STRIDE - 1) // STRIDE
    out_width: tl.constexpr = (WIDTH + STRIDE - 1) // STRIDE
    dtype = result.dtype.element_ty
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, row, picture = pixel % out_width, pixel // out_width % out_height, pixel // (out_height * out_width)
    i, o = tl.arange(0, PADDED), tl.arange(0, OUTPUTS)
    total = tl.zeros((BLOCK, OUTPUTS), tl.float32)
    for tap in tl.static_range(SIZE * SIZE):
        r = row * STRIDE + (tap // SIZE - SIZE // 2)
        c = column * STRIDE + (tap % SIZE - SIZE // 2)
        inside = (r >= 0) & (r < HEIGHT) & (c >= 0) & (c < WIDTH) & (pixel < pixels)
        source = images + ((picture * HEIGHT + r) * WIDTH + c)[:, None] * INPUTS + i[None, :]
        read = tl.load(source, mask=inside[:, None] & (i < INPUTS)[None, :], other=0.0).to(dtype)
        factor = weight + o[None, :] * (SIZE * SIZE * INPUTS) + tap * INPUTS + i[:, None]
        total = tl.dot(read, tl.load(factor, mask=(i < INPUTS)[:, None], other=0.0).to(dtype), total)
    tl.store(result + pixel[:, None] * OUTPUTS + o[None, :], total.to(dtype), mask=(pixel < pixels)[:, None])


@triton.jit
def _images_grad_kernel(
    grad,
    weight,
    result,
    pixels,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """result[pixel] = sum of grad[each output that read the pixel by tap] @ weight[tap] transposed."""
    out_height: tl.constexpr = (HEIGHT + STRIDE - 1) // STRIDE
    out_width: tl.constexpr = (WIDTH + STRIDE - 1) // STRIDE
    dtype = result.dtype.element_ty
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, row, picture = pixel % WIDTH, pixel // WIDTH % HEIGHT, pixel // (HEIGHT * WIDTH)
    i, o = tl.arange(0, INPUTS), tl.arange(0, OUTPUTS)
    total = tl.zeros((BLOCK, INPUTS), tl.float32)
    for tap in tl.static_range(SIZE * SIZE):
        r = row + (SIZE // 2 - tap // SIZE)
        c = column + (SIZE // 2 - tap % SIZE)
        inside = (r >= 0) & (c >= 0) & (pixel < pixels)
        if STRIDE > 1:
            inside = inside & (r % STRIDE == 0) & (c % STRIDE == 0)
            r, c = r // STRIDE, c // STRIDE
        inside = inside & (r < out_height) & (c < out_width)
        source = grad + ((picture * out_height + r) * out_width + c)[:, None] * OUTPUTS + o[None, :]
        read = tl.load(source, mask=inside[:, None], other=0.0).to(dtype)
        factor = weight + o[:, None] * (SIZE * SIZE * INPUTS) + tap * INPUTS + i[None, :]
        total = tl.dot(read, tl.load(factor).to(dtype), total)
    tl.store(result + pixel[:, None] * INPUTS + i[None, :], total.to(dtype), mask=(pixel < pixels)[:, None])


@triton.jit
def _weight_grad_kernel(
    images,
    grad,
    result,
    pixels,
    chunk,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """result[chunk, :, taps of one kernel row] = sum over the chunk's pixels of grad transposed @ shifted images."""
    out_height: tl.constexpr = (HEIGHT + STRIDE - 1) // STRIDE
    out_width: tl.constexpr = (WIDTH + STRIDE - 1) // STRIDE
    dtype = grad.dtype.element_ty
    kernel_row = tl.program_id(1)
    i, o = tl.arange(0, PADDED), tl.arange(0, OUTPUTS)
    left = tl.zeros((PADDED, OUTPUTS), tl.float32)
    middle = tl.zeros((PADDED, OUTPUTS), tl.float32)
    right = tl.zeros((PADDED, OUTPUTS), tl.float32)
    for start in range(0, chunk, BLOCK):
        pixel = tl.program_id(0) * chunk + start + tl.arange(0, BLOCK)
        column, row, picture = pixel % out_width, pixel // out_width % out_height, pixel // (out_height * out_width)
        r, c = row * STRIDE + kernel_row - SIZE // 2, column * STRIDE
        inside = (r >= 0) & (r < HEIGHT) & (pixel < pixels)
        source = images + ((picture * HEIGHT + r) * WIDTH + c)[None, :] * INPUTS + i[:, None]
        known = (i < INPUTS)[:, None]
        given = tl.load(grad + pixel[:, None] * OUTPUTS + o[None, :], mask=(pixel < pixels)[:, None], other=0.0)
        centre = tl.load(source, mask=known & inside[None, :], other=0.0).to(dtype)
        middle = tl.dot(centre, given, middle)
        if SIZE == 3:
            before = tl.load(source - INPUTS, mask=known & (inside & (c > 0))[None, :], other=0.0).to(dtype)
            left = tl.dot(before, given, left)
            after = tl.load(source + INPUTS, mask=known & (inside & (c < WIDTH - 1))[None, :], other=0.0).to(dtype)
            right = tl.dot(after, given, right)
    target = result + tl.program_id(0) * (OUTPUTS * SIZE * SIZE * INPUTS)
    target += o[None, :] * (SIZE * SIZE * INPUTS) + kernel_row * (SIZE * INPUTS) + i[:, None]
    if SIZE == 3:
        tl.store(target, left, mask=(i < INPUTS)[:, None])
        tl.store(target + INPUTS, middle, mask=(i < INPUTS)[:, None])
        tl.store(target + 2 * INPUTS, right, mask=(i < INPUTS)[:, None])
    else:
        tl.store(target, middle, mask=(i < INPUTS)[:, None])


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device, memory_format=torch.channels_last)


def forward(images: Tensor, weight: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    images, weight = _channels_last(images), _channels_last(weight)
    rows, inputs, height, width = images.shape
    outputs, size = weight.shape[0], weight.shape[2]
    result = _empty(images, (rows, outputs, -(-height // stride), -(-width // stride)), dtype)
    pixels = result.numel() // outputs
    block = 2 * _BLOCK if max(inputs, outputs) <= 16 else _BLOCK
    shape = (height, width, inputs, max(16, triton.next_power_of_2(inputs)), outputs, size, stride)
    _forward_kernel[(triton.cdiv(pixels, block),)](images, weight, result, pixels, *shape, block, num_warps=4)
    return result


def images_grad(grad: Tensor, weight: Tensor, stride: int, height: int, width: int) -> Tensor:
    grad, weight = _channels_last(grad), _channels_last(weight)
    inputs, outputs, size = weight.shape[1], weight.shape[0], weight.shape[2]
    result = _empty(grad, (grad.shape[0], inputs, height, width), grad.dtype)
    pixels = result.numel() // inputs
    block = 2 * _BLOCK if max(inputs, outputs) <= 16 else _BLOCK
    shape = (height, width, inputs, outputs, size, stride)
    _images_grad_kernel[(triton.cdiv(pixels, block),)](grad, weight, result, pixels, *shape, block, num_warps=4)
    return result


def weight_grad(images: Tensor, grad: Tensor, stride: int, size: int) -> Tensor:
    """In float32, as the weights are."""
    images, grad = _channels_last(images), _channels_last(grad)
    (_, inputs, height, width), outputs = images.shape, grad.shape[1]
    pixels, block, widest = grad.numel() // outputs, _BLOCK // 2, max(inputs, outputs)
    chunk = triton.cdiv(triton.cdiv(pixels, _CHUNKS if widest <= 16 else _CHUNKS // 2), block) * block
    chunks = triton.cdiv(pixels, chunk)
    parts = torch.empty((chunks, outputs, size, size, inputs), dtype=torch.float32, device=images.device)
    shape = (height, width, inputs, max(16, triton.next_power_of_2(inputs)), outputs, size, stride)
    warps = 1 if widest <= 16 else 2 if widest <= 32 else 4
    _weight_grad_kernel[(chunks, size)](images, grad, parts, pixels, chunk, *shape, block, num_warps=warps)
    return parts.sum(0).permute(0, 3, 1, 2)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
