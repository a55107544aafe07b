"""The CIFAR ResNets against a forward written from their papers: every ReLU, shortcut and stride."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainer.models.factory import create_model

BATCH_NORM_EPS, BATCH_NORM_MOMENTUM = 1e-3, 0.01  # Keras's


class Layers:
    """The tensors of a state dict, taken in order as convolutions and BatchNorms; their names are not read."""

    def __init__(self, state: dict[str, Tensor], training: bool) -> None:
        floating = [tensor.clone() for tensor in state.values() if tensor.is_floating_point()]
        self._tensors: Iterator[Tensor] = iter(floating)
        self._training = training
        self.running: list[Tensor] = []

    def convolution(self, stride: int = 1):
        weight = next(self._tensors)
        return lambda x: functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(self):
        weight, bias, mean, variance = (next(self._tensors) for _ in range(4))
        self.running += [mean, variance]
        return lambda x: functional.batch_norm(
            x, mean, variance, weight, bias, self._training, BATCH_NORM_MOMENTUM, BATCH_NORM_EPS
        )

    def classify(self, maps: Tensor) -> Tensor:
        weight, bias = next(self._tensors), next(self._tensors)
        assert next(self._tensors, None) is None, "the network has more layers than the paper's"
        return functional.linear(functional.adaptive_avg_pool2d(maps, 1).flatten(1), weight, bias)


def forward_v1(layers: Layers, x: Tensor, blocks: int) -> Tensor:
    """He et al. 2016a, section 4.2; shortcuts are projections where the width changes."""
    convolution, norm = layers.convolution(), layers.norm()
    x = functional.relu(norm(convolution(x)))
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            first, norm1 = layers.convolution(stride), layers.norm()
            second, norm2 = layers.convolution(), layers.norm()
            shortcut = x
            if stride == 2:
                project, norm3 = layers.convolution(stride), layers.norm()
                shortcut = norm3(project(x))
            x = functional.relu(norm2(second(functional.relu(norm1(first(x))))) + shortcut)
    return layers.classify(x)


def forward_v2(layers: Layers, x: Tensor, blocks: int) -> Tensor:
    """He et al. 2016b, pre-activation bottlenecks; the first block receives the stem's activated output."""
    convolution, norm = layers.convolution(), layers.norm()
    x = functional.relu(norm(convolution(x)))
    for stage in range(3):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inner = x if stage == block == 0 else functional.relu(layers.norm()(x))
            inner = layers.convolution(stride)(inner)
            for _ in range(2):
                inner = functional.relu(layers.norm()(inner))
                inner = layers.convolution()(inner)
            x = inner + (layers.convolution(stride)(x) if block == 0 else x)
    return layers.classify(functional.relu(layers.norm()(x)))


def scrambled(name: str) -> torch.nn.Module:
    """The network in float64 with BatchNorms that scale, shift and rectify visibly."""
    model = create_model(name, 10, seed=0).double()
    generator = torch.Generator().manual_seed(1)
    for key, tensor in model.state_dict().items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            low, high = (0.5, 1.5) if key.endswith(("weight", "running_var")) else (-0.5, 0.5)
            tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low)
    return model


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("name", "forward", "blocks"),
    [("cifar_resnet20", forward_v1, 3), ("cifar_resnet32", forward_v1, 5), ("cifar_resnet110", forward_v2, 12)],
)
def test_the_forward_pass_is_the_papers(name, forward, blocks, training):
    model = scrambled(name).train(training)
    layers = Layers(model.state_dict(), training)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        expected = forward(layers, images, blocks)
        torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)
    assert expected.std() > 1e-3  # a comparison of zeros would prove nothing
    running = [value for key, value in model.state_dict().items() if "running" in key]
    torch.testing.assert_close(running, layers.running, rtol=1e-9, atol=1e-9)
