"""Fused and compiled blocks of Inception-ResNet-v2 match the original blocks on a GPU."""

import copy

import pytest
import torch

from tests.support.same_numbers import assert_same
from trainer.acceleration import compile as compiling
from trainer.acceleration.rewrite_convs import fuse_convolutions
from trainer.models.factory import create_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]


@pytest.mark.parametrize(
    ("name", "shape", "joined"), [("repeat", (2, 320, 6, 6), 2), ("repeat_1", (2, 1088, 4, 4), 1)]
)
def test_compiled_blocks_give_the_same(monkeypatch, name, shape, joined):
    gone: list[int] = []
    monkeypatch.setattr(compiling, "fuse_convolutions", lambda graph: gone.append(fuse_convolutions(graph)))
    written = create_model("inception_resnet_v2", 5, seed=0).get_submodule(name)[:2].double().to("cuda")
    fast = copy.deepcopy(written)
    torch._dynamo.reset()
    assert compiling.compile_blocks(fast) == 2
    assert_same(written, fast, shape, 1e-8, "cuda")
    assert gone == [joined]  # both blocks share one compilation
