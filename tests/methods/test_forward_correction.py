"""F-correction: -log((Tᵀp)_y) in fp32, a step by hand, bit-exact resume, and T as an earlier start recorded it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.durable import write_json
from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.toy_networks import (
    CLASSES,
    assert_same_network,
    batch_of,
    descend,
    linear,
    losses_of,
    normed,
    setting,
    step_at,
)
from trainer.config.optimisation import OptimizerConfig
from trainer.distributed.world import SINGLE_PROCESS
from trainer.loading.epoch_plan import StaticPlan
from trainer.methods import forward_correction
from trainer.methods.forward_correction import ForwardCorrectionTask, forward_losses
from trainer.methods.transition import normalise_rows
from trainer.passes.table import SampleTable
from trainer.run.recipe import load_recipe

quick = settings(max_examples=60, deadline=None)
T = np.array([[0.7, 0.1, 0.1, 0.1], [0.0, 0.9, 0.1, 0.0], [0.2, 0.2, 0.5, 0.1], [0.3, 0.0, 0.0, 0.7]])


def columns_of(matrix):
    return torch.tensor(matrix).float().clamp(min=torch.finfo(torch.float32).tiny).log().T


def test_losses_by_hand():
    logits = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]]).log()
    losses = forward_losses(logits, torch.tensor([0, 3]), columns_of(T))
    # (0.7 + 0 + 0.2 + 0.3) / 4, and 0.5 * 0.1 + 0 + 0.125 * 0.1 + 0.125 * 0.7
    torch.testing.assert_close(losses, -torch.tensor([0.3, 0.15]).log())


@given(st.integers(0, 1000), st.floats(0.1, 20))
@quick
def test_losses_are_those_of_the_product_with_t(seed, scale):
    draws = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(7, 5, generator=draws, dtype=torch.float64)
    matrix = normalise_rows(np.random.default_rng(seed).random((5, 5)) + 0.01)
    labels = torch.randint(5, (7,), generator=draws)
    q = logits.softmax(dim=1) @ torch.tensor(matrix).float().double()
    expected = -q[torch.arange(7), labels].log()
    torch.testing.assert_close(forward_losses(logits, labels, columns_of(matrix)), expected, rtol=1e-5, atol=1e-6)
    halves = forward_losses(logits.bfloat16(), labels, columns_of(matrix))
    assert halves.dtype == torch.float32


def test_without_noise_it_is_cross_entropy():
    network, batch = linear(1), batch_of(8)
    losses = forward_losses(network(batch.images), batch.labels, columns_of(np.eye(CLASSES)))
    torch.testing.assert_close(losses, losses_of(network, batch.images, batch.labels))


def test_neither_certain_predictions_nor_zeros_of_t_give_infinities():
    logits = torch.tensor([[300.0, -300.0, 0.0, 0.0]], requires_grad=True)
    losses = forward_losses(logits, torch.tensor([1]), columns_of(np.eye(CLASSES)))
    losses.sum().backward()
    assert 50 < losses.item() < 1000
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("build", [linear, normed])
def test_a_step_is_the_gradient_of_the_mean_corrected_loss_of_real_rows(build):
    network, batch = build(1), batch_of(8, real=8 if build is normed else 5)
    real = int(batch.weights.sum())
    task = ForwardCorrectionTask(copy.deepcopy(network), setting(), T)
    report = task.step(batch, step_at(real))
    expected = copy.deepcopy(network).train()
    logits = expected(batch.images)[:real]
    q = logits.softmax(dim=1) @ torch.tensor(T).float()
    loss = -q[torch.arange(real), batch.labels[:real]].log().mean()
    loss.backward()
    descend(expected)
    assert_same_network(task.module, expected)
    torch.testing.assert_close(report["loss"], loss.detach())
    right = (logits.argmax(1) == batch.labels[:real]).float().mean()
    torch.testing.assert_close(report["train_accuracy"], right)


def test_the_loss_is_fp32_under_bf16():
    report = ForwardCorrectionTask(linear(1), setting(precision="bf16"), T).step(batch_of(8), step_at(8))
    exact = ForwardCorrectionTask(linear(1), setting(), T).step(batch_of(8), step_at(8))
    assert report["loss"].dtype == torch.float32
    assert 0 < abs(report["loss"] - exact["loss"]) < 0.05


def test_a_task_goes_on_from_its_state_bit_for_bit():
    optimizer = OptimizerConfig(kind="adam", learning_rate=0.01, weight_decay=0.01)
    first = ForwardCorrectionTask(normed(1), setting(optimizer), T)
    for number in range(3):
        first.step(batch_of(8, seed=number), step_at(8, step=number))
    state = copy.deepcopy(first.state())
    second = ForwardCorrectionTask(normed(7), setting(optimizer), T)
    second.load(state)
    for task in (first, second):
        for number in range(3, 6):
            task.step(batch_of(8, seed=number), step_at(8, step=number))
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name


class Inputs(SimpleNamespace):
    """What the method is given, on 40 samples; remembers the predict passes that it asks for."""

    def __init__(self, folder):
        draws = np.random.default_rng(3)
        probabilities = torch.from_numpy(normalise_rows(draws.random((40, CLASSES))).astype(np.float32))
        status = torch.zeros(40, dtype=torch.int8)
        self.table = SampleTable(torch.arange(40), {"probabilities": probabilities, "status": status})
        super().__init__(
            folder=folder,
            world=SINGLE_PROCESS,
            samples=np.arange(40),
            config=SimpleNamespace(percentile=97.0),
            trained_networks=lambda name: [f"network of {name}"],
            asked=[],
            passes=SimpleNamespace(run=self.run),
            plan=lambda samples: StaticPlan(0, samples, 8, 1),
            module=lambda: linear(1),
            settings=lambda plan: setting(),
        )

    def run(self, network, ids, *, doing):
        self.asked.append((network, ids.tolist(), doing))
        return self.table


def test_t_comes_from_the_network_of_standard_and_is_computed_once(tmp_path):
    inputs = Inputs(tmp_path)
    training = forward_correction.build(inputs)
    assert inputs.asked == [("network of standard", list(range(40)), "predicting the training set")]
    assert np.array(training.facts["transition"]).sum(axis=1) == pytest.approx(1.0)
    write_json(tmp_path / "training.json", training.facts)
    again = Inputs(tmp_path)
    again.table = None  # another machine could predict otherwise
    assert forward_correction.build(again).facts == training.facts
    assert again.asked == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("forward_correction.label_smoothing=0.1", r"forward_correction\.label_smoothing is above 0"),
        ("forward_correction.mixup.alpha=0.2", "forward_correction does not support mixup"),
        ("forward_correction.percentile=0.97", r"forward_correction\.percentile"),  # in percent
    ],
)
def test_what_cannot_be_is_refused(override, words):
    keys = ["methods=[standard, forward_correction]", "forward_correction={epochs: 3}", override]
    with pytest.raises(ConfigError, match=words):
        load_recipe(RECIPES / "tiny.yaml", keys)
