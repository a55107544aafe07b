"""Networks by name: timm's, the paper's CIFAR ResNets, a small one for digits; and pairs of networks."""

import difflib
import math
from typing import Any, Literal

import timm
import torch
from timm.models import register_model
from torch import Tensor, nn
from torch.nn import functional

from shards.errors import ConfigError

DecayScope = Literal["all", "residual_convs"]

# Keras's defaults, which the released code trains with; Keras's momentum of 0.99 is torch's 0.01.
BATCH_NORM_MOMENTUM = 0.01
BATCH_NORM_EPS = 1e-3

# Options of timm.create_model that would fetch weights or unpickle a file. We train from scratch, and
# a recipe may come from anywhere: it cannot set them.
WEIGHT_OPTIONS = frozenset(
    {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
)


def create_model(name: str, num_classes: int, seed: int, **options: Any) -> nn.Module:
    """Build the network `name` on the CPU with random weights that depend on the arguments alone.

    Name: any of timm's, or cifar_resnet20, cifar_resnet32, cifar_resnet110, digits_cnn, registered there.
    Options go to the architecture (`in_chans`, ...). The global random state is neither read nor changed.
    """
    if not timm.is_model(name):
        raise ConfigError(f"unknown model {name!r}; {_near_matches(name)}")
    if refused := sorted(WEIGHT_OPTIONS & options.keys()):
        raise ConfigError(
            f"model option {refused[0]!r} loads weights; models here start from scratch: remove it"
        )
    # Only the CPU generator is seeded: torch.manual_seed would also reseed every GPU, outside the fork below.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        try:
            return timm.create_model(name, pretrained=False, num_classes=num_classes, **options)
        except (TypeError, RuntimeError) as error:
            raise ConfigError(
                f"model {name!r} cannot be built with {num_classes} classes and options {options}: {error}"
            ) from error


def _near_matches(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), timm.list_models(), n=5, cutoff=0.6)
    if near:
        return "did you mean " + ", ".join(near) + "?"
    return "choose one of timm.list_models(), for instance inception_resnet_v2 or cifar_resnet32"


class TwinModel(nn.Module):
    """The two networks of Co-teaching as one module: one optimiser, one engine, one checkpoint."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.a = a
        self.b = b

    def forward(self, x_a: Tensor, x_b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits of both, each [rows, classes]: b sees x_b where given (its peer's choice), else x_a too."""
        return self.a(x_a), self.b(x_a if x_b is None else x_b)


def weight_decay_groups(model: nn.Module, weight_decay: float, scope: DecayScope) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser; every parameter of `model` is in exactly one.

    "all" decays every parameter; "residual_convs", as the released code, only the convolutions inside
    residual blocks (shortcuts included): not the stem, the classifier, nor BatchNorm. Keras's l2(λ) has the
    gradient 2λw, so the released code's l2(1e-4) is a weight_decay of 2e-4 here.
    """
    if scope == "all":
        return [{"params": list(model.parameters()), "weight_decay": weight_decay}]
    if scope != "residual_convs":
        raise ConfigError(f"unknown decay scope {scope!r}; choose 'all' or 'residual_convs'")
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock)]
    decayed = {
        id(layer.weight) for block in blocks for layer in block.modules() if isinstance(layer, nn.Conv2d)
    }
    if not decayed:
        raise ConfigError(
            "decay scope 'residual_convs' is for the cifar_resnet models, and this model has none of their "
            "residual blocks; use 'all'"
        )
    inside = [parameter for parameter in model.parameters() if id(parameter) in decayed]
    outside = [parameter for parameter in model.parameters() if id(parameter) not in decayed]
    return [{"params": inside, "weight_decay": weight_decay}, {"params": outside, "weight_decay": 0.0}]


class _Classifier(nn.Module):
    """timm's classifier protocol over a stack of convolutions: body, global average pool, linear layer."""

    body: nn.Module
    fc: nn.Module

    def __init__(self, body: nn.Module, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.num_classes = num_classes
        self.body = body
        # As in timm, no classes means: return the features.
        self.fc = nn.Linear(num_features, num_classes) if num_classes > 0 else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward_features(self, x: Tensor) -> Tensor:
        """[rows, in_chans, height, width] -> [rows, num_features, height', width']."""
        return self.body(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Feature maps -> logits [rows, classes], or the penultimate features [rows, num_features]."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.fc(pooled)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    # No bias: BatchNorm follows, at once or after the sum of a residual block, and has its own.
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _keras_norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=BATCH_NORM_EPS, momentum=BATCH_NORM_MOMENTUM)


class ResidualBlock(nn.Module):
    """A residual branch and its shortcut; `weight_decay_groups` knows their convolutions by this class."""

    def __init__(self, residual: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


class BasicBlock(ResidualBlock):
    """v1: two 3x3 convolutions, ReLU after the sum; 1x1 convolution and BatchNorm where the width changes."""

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
    """v2: BatchNorm and ReLU before each of 1x1, 3x3, 1x1; nothing after the sum."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, activated: bool) -> None:
        # The stem has already normalised and rectified what the very first block is given.
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
    """He et al. 2016a for 32x32 images: 6n+2 layers, widths 16, 32, 64; initialised as Keras's examples."""

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
    """He et al. 2016b (pre-activation) with bottlenecks: 9n+2 layers, as the paper's theory figures use."""

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
    """Keras's he_normal: variance 2/fan_in, cut at two of the underlying normal's standard deviations."""
    fan_in = weight[0].numel()
    # 0.8796 is the standard deviation of a unit normal cut at ±2.
    deviation = math.sqrt(2.0 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


class DigitsCnn(_Classifier):
    """Four convolutions for 8x8 digits: 132 thousand weights, quick to train on a CPU."""

    def __init__(self, num_classes: int = 10, in_chans: int = 3) -> None:
        layers: list[nn.Module] = []
        inputs = in_chans
        for position, outputs in enumerate((32, 64, 64, 128)):
            if position == 2:
                layers.append(nn.MaxPool2d(2))
            layers += [_convolution(inputs, outputs, 3), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        super().__init__(nn.Sequential(*layers), inputs, num_classes)


# timm calls an entry point with the options about weights too, always; ours has none to load.


@register_model
def cifar_resnet20(**options: Any) -> nn.Module:
    """ResNet-20 v1, 0.27 million weights."""
    return CifarResNetV1(20, **_without_weights(options))


@register_model
def cifar_resnet32(**options: Any) -> nn.Module:
    """ResNet-32 v1, 0.47 million weights: the paper's network for CIFAR-10."""
    return CifarResNetV1(32, **_without_weights(options))


@register_model
def cifar_resnet110(**options: Any) -> nn.Module:
    """ResNet-110 v2, 3.3 million weights: the paper's network that memorises every label (Sec. 5.1)."""
    return CifarResNetV2(110, **_without_weights(options))


@register_model
def digits_cnn(**options: Any) -> nn.Module:
    """The demo's network, for 8x8 images."""
    return DigitsCnn(**_without_weights(options))


def _without_weights(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("pretrained"):
        raise RuntimeError("there are no pretrained weights of this model")
    return {key: value for key, value in options.items() if key not in WEIGHT_OPTIONS}
