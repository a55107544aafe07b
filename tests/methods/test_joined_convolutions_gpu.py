"""Blocks of Inception-ResNet-v2, joined and compiled for a GPU, give what they give as written."""

import copy

import pytest
import torch
from same_numbers import furthest

from trainer.methods.compiling import compile_blocks
from trainer.models import create_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]


@pytest.mark.parametrize(("name", "shape"), [("repeat", (2, 320, 6, 6)), ("repeat_1", (2, 1088, 4, 4))])
def test_a_compiled_block_gives_the_same(name, shape):
    written = create_model("inception_resnet_v2", 5, seed=0).get_submodule(name)[:2].double().to("cuda")
    fast = copy.deepcopy(written)
    assert compile_blocks(fast) == 2
    assert furthest(written, fast, shape, "cuda") < 1e-8
