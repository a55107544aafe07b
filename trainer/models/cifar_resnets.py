"""The paper's CIFAR ResNets, and a small CNN for 8x8 digits."""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

# Keras's defaults, as in the released code; Keras's momentum of 0.99 corresponds to 0.01 in torch.
BATCH_NORM_MOMENTUM = 0.01
BATCH_NORM_EPS = 1e-3


class _Classifier(nn.Module):
    """A convolutional body, global average pooling and a linear layer, with timm's classifier interface."""

    body: nn.Module
    fc: nn.Module

    def __init__(self, body: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_classes = num_classes
        self.body = body
        # As in timm, a network with 0 classes returns the pooled features.
        self.fc = nn.Linear(num_features, num_classes) if num_classes > 0 else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images [rows, in_chans, height, width] to feature maps [rows, num_features, height', width']."""
        return self.body(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map feature maps to logits [rows, classes], or to pooled features [rows, num_features] if `pre_logits`."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.fc(pooled)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    # No bias: a BatchNorm with its own bias follows, directly or after the residual sum.
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _keras_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


class ResidualBlock(nn.Module):
    """The sum of a residual branch and a shortcut; `weight_decay_groups` uses this class to find residual blocks."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


class BasicBlock(ResidualBlock):
    """ResNet v1 block: two 3x3 convolutions, and a ReLU after the sum.

    If the width changes, the shortcut is a 1x1 convolution with BatchNorm.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        residual = nn.Sequential(
            _convolution(inputs, outputs, 3, stride),
            _keras_norm(outputs),
            nn.ReLU(),
            _convolution(outputs, outputs, 3),
            _keras_norm(outputs),
        )
        shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), _keras_norm(outputs))
        super().__init__(residual, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(super().forward(x))


class BottleneckBlock(ResidualBlock):
    """ResNet v2 block: 1x1, 3x3 and 1x1 convolutions, each preceded by BatchNorm and ReLU; no ReLU after the sum."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, activated: bool) -> None:
        # activated: the input has already passed through BatchNorm and ReLU, as after the stem.
        residual = nn.Sequential(
            *([] if activated else [_keras_norm(inputs), nn.ReLU()]),
            _convolution(inputs, width, 1, stride),
            _keras_norm(width),
            nn.ReLU(),
            _convolution(width, width, 3),
            _keras_norm(width),
            nn.ReLU(),
            _convolution(width, outputs, 1),
        )
        projected = inputs != outputs
        super().__init__(residual, _convolution(inputs, outputs, 1, stride) if projected else nn.Identity())


class CifarResNetV1(_Classifier):
    """ResNet v1 of He et al. 2016a for 32x32 images: 6n+2 layers, widths 16, 32 and 64, initialised as in Keras's
    examples."""

    def __init__(self, depth: int, num_classes: int = 10, in_chans: int = 3) -> None:
        blocks = (depth - 2) // 6
        layers: list[nn.Module] = [_convolution(in_chans, 16, 3), _keras_norm(16), nn.ReLU()]
        inputs = 16
        for stage, outputs in enumerate((16, 32, 64)):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(BasicBlock(inputs, outputs, stride))
                inputs = outputs
        super().__init__(nn.Sequential(*layers), inputs, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)


class CifarResNetV2(_Classifier):
    """ResNet v2 (pre-activation) of He et al. 2016b with bottlenecks and 9n+2 layers, used in the paper's theory
    figures."""

    def __init__(self, depth: int, num_classes: int = 10, in_chans: int = 3) -> None:
        blocks = (depth - 2) // 9
        layers: list[nn.Module] = [_convolution(in_chans, 16, 3), _keras_norm(16), nn.ReLU()]
        inputs = 16
        for stage, (width, outputs) in enumerate(((16, 64), (64, 128), (128, 256))):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                activated = stage == 0 and block == 0
                layers.append(BottleneckBlock(inputs, width, outputs, stride, activated))
                inputs = outputs
        layers += [_keras_norm(inputs), nn.ReLU()]
        super().__init__(nn.Sequential(*layers), inputs, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                _he_normal(layer.weight)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)


def _he_normal(weight: Tensor) -> None:
    """Initialise as Keras's he_normal: variance 2/fan_in, truncated at two standard deviations."""
    fan_in = weight[0].numel()
    # 0.8796 is the standard deviation of a unit normal truncated at ±2.
    deviation = math.sqrt(2.0 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


class DigitsCnn(_Classifier):
    """A CNN of four convolutions for 8x8 digits: 132,000 weights, fast to train on a CPU."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3) -> None:
        layers: list[nn.Module] = []
        inputs = in_chans
        for position, outputs in enumerate((32, 64, 64, 128)):
            if position == 2:
                layers.append(nn.MaxPool2d(2))
            layers += [_convolution(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        super().__init__(nn.Sequential(*layers), inputs, num_classes)


SMALL_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cifar_resnet20": lambda **options: CifarResNetV1(20, **options),
    "cifar_resnet32": lambda **options: CifarResNetV1(32, **options),  # the paper's network for CIFAR-10
    "cifar_resnet110": lambda **options: CifarResNetV2(110, **options),  # memorises every label (Sec. 5.1)
    "digits_cnn": lambda **options: DigitsCnn(**options),
}
