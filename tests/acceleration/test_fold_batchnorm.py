"""BatchNorm folded into the preceding convolution: same outputs, and never in train mode."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.same_numbers import assert_same, rewritten
from trainer.acceleration import compile as compiling
from trainer.acceleration.rewrite_convs import fold_batchnorms, fuse_convolutions
from trainer.models.factory import create_model


def lived_in(module: nn.Module) -> nn.Module:
    """As after a training: statistics and weights of BatchNorm that are not those of the beginning."""
    generator = torch.Generator().manual_seed(3)
    for norm in (each for each in module.modules() if isinstance(each, nn.BatchNorm2d)):
        for tensor, low, high in ((norm.running_mean, -1, 1), (norm.running_var, 0.2, 3), (norm.bias, -1, 1)):
            tensor.data.uniform_(low, high, generator=generator)
        norm.weight.data.uniform_(-1.5, 1.5, generator=generator)
    return module


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, bias: bool = False) -> None:
        super().__init__()
        sizes = (inputs * groups, outputs * groups)
        self.conv = nn.Conv2d(*sizes, kernel, stride, kernel // 2, groups=groups, bias=bias)
        self.bn = nn.BatchNorm2d(outputs * groups)

    def forward(self, images):
        return torch.relu_(self.bn(self.conv(images)))


@given(
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 4),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    groups=st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_any_convolution_gives_the_same(inputs, outputs, kernel, stride, groups):
    written = lived_in(Block(inputs, outputs, kernel, stride, groups)).double().eval()
    fast = copy.deepcopy(written)
    gone, images = rewritten(fast, fold_batchnorms), torch.randn(3, inputs * groups, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(fast(images), written(images), rtol=0, atol=1e-12)
    assert gone == [1]


def test_gradients_are_the_same():
    """Of a network whose statistics are frozen."""
    written = lived_in(Block(3, 4, 3, 1, 1)).double().eval()
    fast = copy.deepcopy(written)
    gone = rewritten(fast, fold_batchnorms)
    assert_same(written, fast, (3, 3, 5, 5), 1e-10)
    assert gone == [1]


def test_what_learns_stays():
    written = lived_in(Block(3, 4, 3, 1, 1)).double().train()
    fast = copy.deepcopy(written)
    gone, images = rewritten(fast, fold_batchnorms), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    assert torch.equal(fast(images), written(images))
    assert all(torch.equal(one, two) for one, two in zip(fast.buffers(), written.buffers(), strict=True))
    assert gone == [0]


class SeenTwice(Block):
    """The convolution's result goes elsewhere too."""

    def forward(self, images):
        result = self.conv(images)
        return self.bn(result) + result


class Overwritten(Block):
    """What the convolution read is gone when BatchNorm is applied."""

    def forward(self, images):
        read = images * 1.0
        result = self.conv(read)
        read = torch.relu_(read)
        return self.bn(result) + read


class Frozen(Block):
    """The convolution alone is computed without gradients."""

    def forward(self, images):
        with torch.no_grad():
            result = self.conv(images)
        return self.bn(result)


OTHERS = [
    SeenTwice(3, 3, 1, 1, 1),
    Block(3, 3, 1, 1, 1, bias=True),
    Overwritten(3, 3, 1, 1, 1),
    Frozen(3, 3, 1, 1, 1),
]


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: type(block).__name__)
def test_others_stay(block):
    fast = copy.deepcopy(lived_in(block).double().eval())
    gone, images = rewritten(fast, fold_batchnorms), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    assert torch.equal(fast(images), block(images))
    assert sum(gone) == 0


class Reused(nn.Module):
    """Heads that learn, behind a BatchNorm that is folded; what they read is overwritten between them."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Block(3, 4, 1, 1, 1)
        self.one, self.two = Block(4, 2, 1, 1, 1), Block(4, 2, 1, 1, 1)

    def forward(self, images):
        read = self.frozen.bn(self.frozen.conv(images))
        first = self.one.bn(self.one.conv(read))
        read.detach().exp_()
        return torch.cat([first, self.two.bn(self.two.conv(read))], 1)


def test_what_is_folded_is_still_seen_to_be_overwritten():
    written = lived_in(Reused()).double().train()
    written.frozen.eval()
    fast, images = copy.deepcopy(written), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    gone = rewritten(fast, lambda graph: 10 * fold_batchnorms(graph) + fuse_convolutions(graph))
    with torch.no_grad():
        torch.testing.assert_close(fast(images), written(images), rtol=0, atol=1e-12)
    assert gone == [10]


def test_inception_answers_the_same():
    """One block of each kind: those of a kind differ in their weights alone."""
    written = lived_in(create_model("inception_resnet_v2", 5, seed=0)).double().eval()
    for name in ("repeat", "repeat_1", "repeat_2"):
        setattr(written, name, getattr(written, name)[:1])
    norms = sum(isinstance(each, nn.BatchNorm2d) for each in written.modules())
    fast, images = copy.deepcopy(written), torch.randn(2, 3, 75, 75, dtype=torch.float64)
    gone = rewritten(fast, fold_batchnorms)
    with torch.no_grad():
        ours, theirs = fast(images), written(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert sum(gone) == norms


def test_the_type_stays_that_of_mixed_precision():
    written = lived_in(Block(3, 4, 3, 1, 1)).eval()
    fast, images = copy.deepcopy(written), torch.randn(8, 3, 9, 9)
    gone = rewritten(fast, fold_batchnorms)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = fast(images), written(images)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    assert gone == [1]


def test_compiled_blocks_are_folded(monkeypatch):
    """By inductor, in eval mode only."""
    gone: list[int] = []
    monkeypatch.setattr(compiling, "fold_batchnorms", lambda graph: gone.append(fold_batchnorms(graph)))
    written = nn.Sequential(lived_in(Block(3, 4, 3, 1, 1))).double()
    fast, images = copy.deepcopy(written), torch.randn(3, 3, 5, 5, dtype=torch.float64)
    torch._dynamo.reset()
    assert compiling.compile_blocks(fast) == 1
    fast(images)
    written(images)
    with torch.no_grad():
        torch.testing.assert_close(fast.eval()(images), written.eval()(images), rtol=0, atol=1e-12)
    assert gone == [0, 1]
