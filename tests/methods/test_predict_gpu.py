"""Predict passes replayed from CUDA graphs match eager ones. `make test-gpu` runs these."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trainer.acceleration.graphed_forward
import trainer.passes.forward
from trainer.acceleration import compile as compiling
from trainer.acceleration.streams import capture_graph
from trainer.loading.batch import Batch
from trainer.passes.forward import iterate_forward, on_priority_stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
GPU = torch.device("cuda", 0)
GO_ON = SimpleNamespace(reason=lambda: None)
SMALL, LARGE = (16, 32), (16, 512)
"""Rows and pixels of batches that are recorded in any pass, and of those that are in long ones only."""


def network_of(seed):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        body = (nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*body, nn.Dropout(0.5), nn.Linear(8, 5)).to(GPU)


class Block(nn.Module):
    """Makes five numbers of a picture, and five others of those."""

    def __init__(self, seed):
        super().__init__()
        self.body = network_of(seed)

    def forward(self, images):
        pictures = images if images.dim() == 4 else images[:, :3, None, None].expand(-1, -1, 9, 9)
        return self.body(pictures.contiguous())


class Loader:
    """A batch for each of the requests, made when it is asked for."""

    def batches(self, requests):
        for request in requests:
            generator = torch.Generator(GPU).manual_seed(request.seed)
            images = torch.randn(
                request.real_rows, 3, request.pixels, request.pixels, generator=generator, device=GPU
            )
            ids = torch.arange(request.real_rows, device=GPU)
            yield Batch(ids, images, torch.ones(request.real_rows, device=GPU))

    def close(self):
        pass


def requests_of(count, shape, last_rows=None):
    rows, pixels = shape
    requests = [SimpleNamespace(seed=number, real_rows=rows, pixels=pixels) for number in range(count)]
    if last_rows is not None:
        requests[-1].real_rows = last_rows
    return requests


def scores_of(networks, requests, precision, graphs):
    """What a pass answers, batch by batch, network by network."""
    passes = iterate_forward(networks, Loader(), requests, GPU, precision, GO_ON, "predict", graphs)
    with on_priority_stream(GPU):
        return [[scores.clone() for (scores,) in answered] for _, answered in passes]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "count"), [(SMALL, 12), (LARGE, 40)])
def test_a_replayed_pass_answers_as_an_eager_one(shape, count, precision):
    networks, requests = [network_of(1), network_of(2)], requests_of(count, shape, last_rows=5)
    eager = scores_of(networks, requests, precision, graphs=False)
    assert_same(scores_of(networks, requests, precision, graphs=True), eager)
    assert not torch.equal(eager[-3][0], eager[-2][0])  # or a recording that answers one thing would do


@pytest.fixture
def recorded(monkeypatch):
    """A list that grows by one for each recording."""
    made = []
    monkeypatch.setattr(
        trainer.acceleration.graphed_forward, "capture_graph", lambda on: made.append(on) or capture_graph(on)
    )
    return made


def test_a_recording_serves_later_passes(recorded):
    """Also short ones, which alone would not be recorded."""
    network, requests = network_of(1), requests_of(40, LARGE)
    scores_of([network], requests[:20], "fp32", graphs=True)
    assert len(recorded) == 0
    first = scores_of([network], requests, "fp32", graphs=True)
    assert_same(scores_of([network], requests, "fp32", graphs=True), first)
    assert_same(scores_of([network], requests[:20], "fp32", graphs=True), first[:20])
    assert len(recorded) == 1


def test_a_recording_is_let_go_where_memory_is_short(monkeypatch, recorded):
    monkeypatch.setattr(trainer.acceleration.graphed_forward, "_SPARED", 10_000)
    network, requests = network_of(1), requests_of(40, LARGE)
    first = scores_of([network], requests, "fp32", graphs=True)
    assert_same(scores_of([network], requests, "fp32", graphs=True), first)
    assert len(recorded) == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_long_pass_is_compiled_and_replayed(monkeypatch, recorded, shape, precision):
    """And after it a short one is as written again, with the weights of its time."""
    compiled = []
    monkeypatch.setattr(compiling, "fold_batchnorms", compiled.append)
    torch._dynamo.reset()
    network, requests = nn.Sequential(Block(1), Block(2)), requests_of(40, shape)
    eager = scores_of([network], requests, precision, graphs=False)
    assert compiling.compile_blocks(network) == 2
    assert_same(scores_of([network], requests, precision, graphs=True), eager)
    assert (compiled, len(recorded)) == ([], 1)  # not long enough
    monkeypatch.setattr(trainer.passes.forward, "WORTH_COMPILING", 40 * shape[0])
    for _ in range(2):
        ours = scores_of([network], requests, precision, graphs=True)
        torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-2 if precision == "bf16" else 1e-5)
    assert len(compiled) == 2  # for pictures, and for numbers
    assert len(recorded) == 2  # and kept
    with torch.no_grad():
        network[0].body[-1].weight.mul_(-3.0)
    changed = scores_of([network], requests, precision, graphs=True)
    short = scores_of([network], requests[-2:], precision, graphs=True)
    torch.testing.assert_close(changed[-2:], short, rtol=1e-2, atol=2e-2 if precision == "bf16" else 1e-4)
    assert not torch.allclose(changed[-1][0], ours[-1][0], atol=0.1)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_the_next_pass_has_the_weights_of_its_time(shape):
    """Changed where they are, as an optimiser does; and moved, as by a load that replaces them."""
    network, requests = network_of(1), requests_of(40, shape)
    before = scores_of([network], requests, "fp32", graphs=True)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    changed = scores_of([network], requests, "fp32", graphs=True)
    assert_same(changed, scores_of([network], requests, "fp32", graphs=False))
    assert not torch.equal(changed[-1][0], before[-1][0])
    for parameter in network.parameters():
        parameter.data = parameter.data.clone() * 0.5
    assert_same(
        scores_of([network], requests, "fp32", graphs=True), scores_of([network], requests, "fp32", graphs=False)
    )


def test_a_network_that_looks_at_its_numbers_is_computed_eagerly(capsys):
    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network_of(1)

        def forward(self, images):
            return self.inner(images / (1 + images.abs().amax().item()))

    network, requests = Looking(), requests_of(6, SMALL)
    eager = scores_of([network], requests, "fp32", graphs=False)
    assert_same(scores_of([network], requests, "fp32", graphs=True), eager)
    assert "runs eagerly" in capsys.readouterr().err
