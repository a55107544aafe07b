"""Convolutions with few channels as Triton kernels, run by Triton's interpreter: the same results as torch's."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.support.same_numbers import rewritten
from trainer.acceleration.narrow_convs import replace_narrow_convolutions


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton", reason="torch brings Triton along on Linux only")
    command = [sys.executable, "-m", "tests.support.interpreted_convs"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_results_and_gradients_equal_those_of_torch(interpreted):
    assert all(error < 1e-5 for errors in interpreted["convolutions"] for error in errors)


def test_residual_blocks_equal_themselves_up_to_16_bit_rounding(interpreted):
    assert interpreted["block"]["replaced"] == [5]  # four 3x3 convolutions, and the 1x1 of the shortcut
    # Roundings of four layers add up, and torch's own convolutions round differently on each kind of processor.
    assert all(error < 1e-2 for error in interpreted["block"]["errors"])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3, padding=1, bias=True),
        nn.Conv2d(16, 16, 3, padding=0, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, dilation=2, bias=False),
        nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(16, 16, 5, padding=2, bias=False),
        nn.Conv2d(16, 48, 3, padding=1, bias=False),
        nn.Conv2d(128, 16, 3, padding=1, bias=False),
        nn.Conv2d(16, 16, (1, 3), padding=(0, 1), bias=False),
        nn.Conv2d(16, 16, 3, stride=3, padding=1, bias=False),
        nn.Conv2d(16, 16, 3, stride=(1, 2), padding=1, bias=False),
    ],
    ids=["bias", "no padding", "dilation", "groups", "5x5", "48 outputs", "128 inputs", "1x3", "stride 3", "1x2"],
)
def test_other_convolutions_are_left_to_cudnn(layer):
    found = rewritten(layer, lambda graph: replace_narrow_convolutions(graph, "cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, layer.in_channels, 9, 9))
    assert found == [0]


def test_large_images_are_left_to_cudnn():
    layer = nn.Conv2d(16, 16, 3, padding=1, bias=False)
    found = rewritten(layer, lambda graph: replace_narrow_convolutions(graph, "cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 16, 33, 32))
    assert found == [0]


def test_full_precision_and_other_devices_are_left_to_torch():
    layer, images = nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.randn(1, 16, 4, 4)
    found = rewritten(layer, lambda graph: replace_narrow_convolutions(graph, "cpu"))
    layer(images)
    assert found == [0]
    found = rewritten(layer, replace_narrow_convolutions)
    with torch.autocast("cpu", torch.bfloat16):
        layer(images)
    assert found == [0]
