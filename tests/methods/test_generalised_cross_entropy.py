"""Generalised cross-entropy: its values and gradients, and where a recipe may ask for it."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.toy_networks import RATE, batch_of, linear, setting, step_at
from trainer.methods.losses import generalised_losses, sample_losses
from trainer.methods.standard import StandardTask
from trainer.run.recipe import load_recipe

DEMO = RECIPES / "demo.yaml"
CLASSES = 4


def rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 3 * torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits.to(dtype), torch.arange(6) % CLASSES


def test_values_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    found = generalised_losses(logits, torch.tensor([0, 1]), 0.5)
    torch.testing.assert_close(found, torch.tensor([2 * (1 - math.sqrt(0.25)), 2 * (1 - math.sqrt(0.5))]))


@given(st.floats(0.05, 1.0))
def test_the_gradient_is_that_of_the_cross_entropy_times_a_power_of_the_probability(q: float) -> None:
    logits, labels = rows()
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    generalised_losses(ours, labels, q).sum().backward()
    sample_losses(plain, labels).sum().backward()
    power = logits.softmax(1).gather(1, labels[:, None]) ** q
    torch.testing.assert_close(ours.grad, power * plain.grad)


def test_its_limits_are_the_cross_entropy_and_the_mean_absolute_error() -> None:
    logits, labels = rows()
    torch.testing.assert_close(generalised_losses(logits, labels, 1e-9), sample_losses(logits, labels))
    wrong = (logits.softmax(1) - torch.eye(CLASSES)[labels]).abs().sum(1) / 2
    torch.testing.assert_close(generalised_losses(logits, labels, 1.0), wrong)


def test_mixed_and_smoothed_targets_are_sums_over_their_classes() -> None:
    logits, labels = rows()
    other = labels.flip(0)
    eye = torch.eye(CLASSES, dtype=torch.float64)
    mixed = generalised_losses(logits, 0.3 * eye[labels] + 0.7 * eye[other], 0.7)
    expected = 0.3 * generalised_losses(logits, labels, 0.7) + 0.7 * generalised_losses(logits, other, 0.7)
    torch.testing.assert_close(mixed, expected)
    spread = generalised_losses(logits, 0.8 * eye[labels] + 0.2 / CLASSES, 0.7)
    torch.testing.assert_close(generalised_losses(logits, labels, 0.7, smoothing=0.2), spread)


def test_it_is_fp32_also_under_bf16_and_keeps_what_is_not_finite() -> None:
    logits, labels = rows(torch.bfloat16)
    assert generalised_losses(logits, labels, 0.7).dtype == torch.float32
    logits[2, 0] = torch.nan
    assert torch.isnan(generalised_losses(logits, labels, 0.7)).tolist() == [row == 2 for row in range(6)]


def test_a_label_without_any_probability_has_a_finite_gradient() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss = generalised_losses(logits, torch.tensor([1]), 0.7)
    torch.testing.assert_close(loss, torch.tensor([1 / 0.7]))
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(1, 2))


def test_a_step_takes_its_gradient() -> None:
    network, batch = linear(1), batch_of(8, real=5)
    task = StandardTask(copy.deepcopy(network), setting(gce_q=0.7))
    report = task.step(batch, step_at(5))
    p = network(batch.images[:5]).softmax(1).gather(1, batch.labels[:5, None])[:, 0]
    loss = ((1 - p**0.7) / 0.7).mean()
    torch.testing.assert_close(report["loss"], loss.detach())
    loss.backward()
    torch.testing.assert_close(task.module[1].weight, network[1].weight - RATE * network[1].weight.grad)


def test_only_trainings_on_the_given_labels_take_it() -> None:
    recipe = load_recipe(DEMO, ["incv.gce.q=0.5", "standard.gce.q=0.7"])
    assert recipe.incv is not None
    assert recipe.incv.gce.q == 0.5
    assert recipe.section("standard").gce.q == 0.7
    with pytest.raises(ConfigError, match=r"coteaching\.gce"):
        load_recipe(DEMO, ["coteaching.gce.q=0.7"])


@pytest.mark.parametrize("q", ["0", "-0.1", "1.5"])
def test_a_power_outside_its_range_is_refused(q: str) -> None:
    with pytest.raises(ConfigError, match=r"incv\.gce\.q"):
        load_recipe(DEMO, [f"incv.gce.q={q}"])
