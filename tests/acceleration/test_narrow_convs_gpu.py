"""The compiled ResNet-20, whose convolutions are Triton kernels, matches the network as written, on a GPU."""

import copy

import pytest
import torch

from trainer.acceleration import compile as compiling
from trainer.acceleration.narrow_convs import replace_narrow_convolutions
from trainer.models.factory import create_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.mark.parametrize("rows", [128, 77])
def test_the_compiled_network_gives_the_same(monkeypatch, rows):
    replaced: list[int] = []
    monkeypatch.setattr(
        compiling, "replace_narrow_convolutions", lambda graph: replaced.append(replace_narrow_convolutions(graph))
    )
    written = create_model("cifar_resnet20", 10, seed=0).to("cuda", memory_format=torch.channels_last)
    fast, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    torch._dynamo.reset()
    compiling.compile_blocks(fast)
    images = torch.randn(rows, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(10, (rows,), device="cuda")
    grads = []
    for network, given in ((written, images), (fast, images), (exact, images.double())):
        with torch.autocast("cuda", torch.bfloat16, enabled=network is not exact):
            loss = torch.nn.functional.cross_entropy(network(given), labels)
        loss.backward()
        grads.append(torch.cat([each.grad.flatten().double() for each in network.parameters()]))
    cudnn, ours, exactly = grads
    # Blocks of one kind share a compilation: 2 + 3 + 2 + 3 + 2 convolutions; newer versions of torch than 2.11 also
    # compile the first convolution, which is a block of its own.
    assert sum(replaced) in (12, 13)
    assert (ours - exactly).norm() < 1.2 * (cudnn - exactly).norm()


def test_gradients_are_the_same_bits_every_time():
    network = create_model("cifar_resnet20", 10, seed=0).to("cuda", memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiling.compile_blocks(network)
    images = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    first = None
    for _ in range(4):
        network.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            network(images).square().mean().backward()
        found = network.body[3].residual[0].weight.grad.clone()
        assert first is None or torch.equal(found, first)
        first = found
