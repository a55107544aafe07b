"""Reference training steps: each method in plain eager PyTorch, written from its description.

They use bf16 autocast, channels last, fixed shapes and cudnn.benchmark, like a careful port before compilation or
graph capture. No `.item()`: there is no host-device sync. Nothing from the trainer is imported.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Optimiser = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's default implementation, which on a GPU is the foreach one."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def network(name: str, classes: int, device: torch.device) -> nn.Module:
    """One of timm's by name, or `cifar_resnet<depth>` of this file."""
    if name.startswith("cifar_resnet"):
        made: nn.Module = CifarResNet(int(name.removeprefix("cifar_resnet")), classes)
    else:
        import timm

        made = timm.create_model(name, pretrained=False, num_classes=classes)
    return made.to(device).to(memory_format=torch.channels_last)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


class PlainStep:
    """One network, mean cross-entropy."""

    def __init__(self, model: nn.Module, optimiser: Optimiser = sgd) -> None:
        self._model, self._optimiser = model.train(), optimiser(model.parameters())

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """images: [rows, 3, size, size], channels last; labels: int64 [rows]."""
        self._optimiser.zero_grad(set_to_none=True)
        with autocast(images.device):
            loss = F.cross_entropy(self._model(images), labels)
        loss.backward()
        self._optimiser.step()


class RankedCoteaching:
    """Co-teaching as its released code runs it: rank all rows in eval mode, then train on the peer's choice alone.

    The two networks follow one another, each with an optimiser of its own.
    """

    def __init__(self, a: nn.Module, b: nn.Module, optimiser: Optimiser = sgd) -> None:
        self._networks = a, b
        self._optimisers = optimiser(a.parameters()), optimiser(b.parameters())

    def __call__(self, images: Tensor, labels: Tensor, keep: int) -> None:
        of_a, of_b = (self._easy(model, images, labels, keep) for model in self._networks)
        for model, optimiser, rows in zip(self._networks, self._optimisers, (of_b, of_a), strict=True):
            model.train()
            optimiser.zero_grad(set_to_none=True)
            chosen = images[rows].contiguous(memory_format=torch.channels_last)
            with autocast(images.device):
                loss = F.cross_entropy(model(chosen), labels[rows])
            loss.backward()
            optimiser.step()

    def _easy(self, model: nn.Module, images: Tensor, labels: Tensor, keep: int) -> Tensor:
        model.eval()
        with torch.no_grad(), autocast(images.device):
            losses = F.cross_entropy(model(images), labels, reduction="none")
        return torch.argsort(losses)[:keep]


class OneForwardCoteaching:
    """Two separate networks, one forward of each in train mode whose losses both choose and teach.

    Both graphs of activations are alive at the exchange: the memory that any one-forward implementation needs.
    """

    def __init__(self, a: nn.Module, b: nn.Module, optimiser: Optimiser = sgd) -> None:
        self._networks = a.train(), b.train()
        self._optimisers = optimiser(a.parameters()), optimiser(b.parameters())

    def __call__(self, images: Tensor, labels: Tensor, keep: int) -> None:
        for optimiser in self._optimisers:
            optimiser.zero_grad(set_to_none=True)
        with autocast(images.device):
            of_a, of_b = (F.cross_entropy(model(images), labels, reduction="none") for model in self._networks)
        easy_a, easy_b = (torch.argsort(losses.detach())[:keep] for losses in (of_a, of_b))
        of_a[easy_b].mean().backward()
        of_b[easy_a].mean().backward()
        for optimiser in self._optimisers:
            optimiser.step()


class _Block(nn.Module):
    """Two 3x3 convolutions, and a 1x1 convolution on the way round where the width changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(outputs)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(outputs)
        self.ctx: nn.Module = nn.Identity()
        if inputs != outputs:
            self.ctx = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.norm_one(self.one(x)), inplace=True)
        return F.relu(self.norm_two(self.two(inside)) + self.ctx(x), inplace=True)


class CifarResNet(nn.Module):
    """He et al. 2016 for 32x32 images: 6n + 2 layers of widths 16, 32, 64."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width for width in (16, 32, 64) for _ in range((depth - 2) // 6)]
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*map(_Block, [16, *widths], widths))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits
