"""Parallel convolution heads fused into one: same outputs, and only for the same input in the same mode."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.same_numbers import assert_same, rewritten
from trainer.acceleration import compile as compiling
from trainer.acceleration.rewrite_convs import fuse_convolutions
from trainer.models.factory import create_model

CHANNELS = 6


class Head(nn.Module):
    def __init__(self, outputs: int, kernel: int = 1, stride: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, outputs, kernel, stride, kernel // 2, bias=bias)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, images):
        return F.relu(self.bn(self.conv(images)), inplace=True).mean((2, 3))


class Branches(nn.Module):
    def __init__(self, heads: list[Head]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, images):
        return torch.cat([head(images) for head in self.heads], 1)


POINT = st.builds(Head, st.integers(1, 5))
OTHER = st.one_of(
    st.builds(Head, st.integers(1, 5), st.just(3)),
    st.builds(Head, st.integers(1, 5), st.just(1), st.just(2)),
    st.builds(Head, st.integers(1, 5), bias=st.just(True)),
)


@given(points=st.lists(POINT, min_size=1, max_size=4), others=st.lists(OTHER, max_size=3), draw=st.randoms())
@settings(max_examples=15, deadline=None)
def test_any_branches_give_the_same(points, others, draw):
    heads = [*points, *others]
    draw.shuffle(heads)
    written = Branches(heads).double()
    fast = copy.deepcopy(written)
    gone = rewritten(fast, fuse_convolutions)
    assert_same(written, fast, (3, CHANNELS, 5, 5))
    assert gone == [len(points) - 1]


def test_inception_gives_the_same():
    written = create_model("inception_resnet_v2", 5, seed=0).double()
    fast = copy.deepcopy(written)
    blocks = {
        "mixed_5b": (2, (2, 192, 6, 6)),
        "repeat.0": (2, (2, 320, 6, 6)),
        "mixed_6a": (0, (2, 320, 6, 6)),
        "repeat_1.0": (1, (2, 1088, 4, 4)),
        "mixed_7a": (2, (2, 1088, 5, 5)),
        "repeat_2.0": (1, (2, 2080, 3, 3)),
    }
    for name, (expected, shape) in blocks.items():
        gone = rewritten(fast.get_submodule(name), fuse_convolutions)
        assert_same(written.get_submodule(name), fast.get_submodule(name), shape, 1e-9)
        assert gone == [expected], name


class Between(nn.Module):
    """Something happens between two heads."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.second, self.between = Head(2), Head(3), between

    def forward(self, images):
        read = images * 1.0
        first = self.first(read)
        seen = self.between(read, self.second)
        return torch.cat([first, self.second(read if seen is None else seen)], 1)


def overwritten(read, head):
    read.detach().mul_(2.0)


def overwritten_in_part(read, head):
    read.detach()[:, :2].zero_()


def weight_overwritten(read, head):
    head.conv.weight.detach().mul_(2.0)


def moved(read, head):
    return read + 1.0


@pytest.mark.parametrize("between", [overwritten, overwritten_in_part, weight_overwritten, moved])
def test_heads_that_read_different_numbers_stay_apart(between):
    written = Between(between).double()
    fast = copy.deepcopy(written)
    gone = rewritten(fast, fuse_convolutions)
    images = torch.randn(3, CHANNELS, 5, 5, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(written(images), fast(images))
    assert sum(gone) == 0


class Switched(nn.Module):
    """One head in another mode than the other."""

    def __init__(self, mode, first: bool) -> None:
        super().__init__()
        self.heads, self.mode, self.modes = nn.ModuleList([Head(2), Head(3)]), mode, (first, not first)

    def forward(self, images):
        results = []
        for head, special in zip(self.heads, self.modes, strict=True):
            with self.mode() if special else nullcontext():
                results.append(head(images).float())
        return torch.cat(results, 1)


def half():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("mode", [torch.no_grad, half])
@pytest.mark.parametrize("first", [True, False])
def test_heads_in_different_modes_stay_apart(mode, first):
    written = Switched(mode, first)
    fast, images = copy.deepcopy(written), torch.randn(3, CHANNELS, 5, 5)
    gone = rewritten(fast, fuse_convolutions)
    for each in (written, fast):
        each(images).sum().backward()
    assert torch.equal(written(images), fast(images))
    for one, two in zip(written.parameters(), fast.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
    assert sum(gone) == 0


class WithoutNorm(nn.Module):
    """What follows writes into the convolutions' results, which would now be parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, 3, 1, bias=False) for _ in range(2))

    def forward(self, images):
        return torch.cat([torch.relu_(self.first(images)), self.second(images).mul_(2.0)], 1)


def _convolved(images, weight):
    return F.conv2d(images, weight, None, (1, 1), (0, 0), (1, 1), 1)


class ScaledWeights(nn.Module):
    """Weights that are computed, perhaps after the first convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Head(2), Head(2)

    def forward(self, images):
        first = self.first(images)
        weight = self.second.conv.weight * first.mean()
        return torch.cat([first, self.second.bn(_convolved(images, weight)).mean((2, 3))], 1)


@pytest.mark.parametrize("kind", [WithoutNorm, ScaledWeights])
def test_others_stay_apart(kind):
    written = kind().double()
    fast = copy.deepcopy(written)
    gone = rewritten(fast, fuse_convolutions)
    assert_same(written, fast, (3, CHANNELS, 5, 5))
    assert gone == [0]


def test_compiled_blocks_are_joined(monkeypatch):
    """By inductor, with autograd and a compiled backward."""
    gone: list[int] = []
    monkeypatch.setattr(compiling, "fuse_convolutions", lambda graph: gone.append(fuse_convolutions(graph)))
    written = nn.Sequential(Branches([Head(2), Head(3), Head(4, kernel=3)])).double()
    fast = copy.deepcopy(written)
    torch._dynamo.reset()
    assert compiling.compile_blocks(fast) == 1
    assert_same(written, fast, (3, CHANNELS, 5, 5))
    assert gone == [1]
