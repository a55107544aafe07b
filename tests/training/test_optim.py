"""Schedules at every epoch boundary, and the optimisers against steps computed by hand."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.config.optimisation import OptimizerConfig
from trainer.models.factory import create_model
from trainer.training.optim import (
    cosine_rate_at,
    init_moments,
    learning_rate_at,
    make_optimizer,
    scheduled_rate,
    set_learning_rate,
)


@dataclass(frozen=True)
class Schedule:
    """A piecewise constant learning rate."""

    base: float
    """Learning rate from the first step on."""
    milestones: tuple[tuple[int, float], ...]
    """(epochs done, learning rate from there on), in rising order of epochs."""


# Supp. A of the paper. "After 20 epochs" is taken literally: epochs 0..19 run at the rate before.
PAPER_SCHEDULES: dict[str, Schedule] = {
    # Adam, 50 epochs a round: halved after 20 and 30, "finally takes the value 1e-4 after 40"
    "cifar10_incv": Schedule(1e-3, ((20, 5e-4), (30, 2.5e-4), (40, 1e-4))),
    # Adam, 200 epochs: a tenth after 80, 120 and 160, half after 180
    "cifar10_main": Schedule(1e-3, ((80, 1e-4), (120, 1e-5), (160, 1e-6), (180, 5e-7))),
    # SGD, 50 epochs a round: halved after 20 and 30, 0.01 after 40
    "webvision_incv": Schedule(0.1, ((20, 0.05), (30, 0.025), (40, 0.01))),
    # SGD, 120 epochs: a tenth after 40 and 80
    "webvision_main": Schedule(0.1, ((40, 0.01), (80, 0.001))),
}


STEPS_PER_EPOCH = 7

# (name, first epoch, one past the last epoch, rate), from Supp. A
PAPER_RATES = [
    ("cifar10_incv", 0, 20, 1e-3),
    ("cifar10_incv", 20, 30, 5e-4),
    ("cifar10_incv", 30, 40, 2.5e-4),
    ("cifar10_incv", 40, 50, 1e-4),
    ("cifar10_main", 0, 80, 1e-3),
    ("cifar10_main", 80, 120, 1e-4),
    ("cifar10_main", 120, 160, 1e-5),
    ("cifar10_main", 160, 180, 1e-6),
    ("cifar10_main", 180, 200, 5e-7),
    ("webvision_incv", 0, 20, 0.1),
    ("webvision_incv", 20, 30, 0.05),
    ("webvision_incv", 30, 40, 0.025),
    ("webvision_incv", 40, 50, 0.01),
    ("webvision_main", 0, 40, 0.1),
    ("webvision_main", 40, 80, 0.01),
    ("webvision_main", 80, 120, 0.001),
]


@pytest.mark.parametrize(("name", "first", "end", "rate"), PAPER_RATES)
def test_paper_schedules_at_their_boundaries(name, first, end, rate):
    schedule = PAPER_SCHEDULES[name]
    for step in (first * STEPS_PER_EPOCH, end * STEPS_PER_EPOCH - 1):
        assert learning_rate_at(step, STEPS_PER_EPOCH, schedule.base, schedule.milestones) == rate


@given(st.integers(0, 10_000), st.integers(1, 50), st.permutations([(2, 0.5), (5, 0.1), (9, 0.01)]))
def test_the_last_milestone_passed_holds_in_any_order_of_writing(step, steps_per_epoch, milestones):
    epoch = step // steps_per_epoch
    expected = 1.0 if epoch < 2 else 0.5 if epoch < 5 else 0.1 if epoch < 9 else 0.01
    assert learning_rate_at(step, steps_per_epoch, 1.0, milestones) == expected


def test_warm_up_climbs_linearly_to_the_base_rate():
    rates = [learning_rate_at(step, 4, 0.8, [(3, 0.08)], warmup_epochs=2) for step in range(14)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.08, 0.08])
    assert learning_rate_at(0, 4, 0.8, [], warmup_epochs=0.5) == pytest.approx(0.4)
    assert learning_rate_at(0, 4, 0.8, [], warmup_epochs=0.0) == 0.8


def test_impossible_steps_are_refused():
    with pytest.raises(ValueError, match="step is -1"):
        learning_rate_at(-1, 4, 0.1, [])
    with pytest.raises(ValueError, match="steps_per_epoch is 0"):
        learning_rate_at(0, 0, 0.1, [])


def test_cosine_rates_by_hand():
    rates = [cosine_rate_at(step, 6, 0.8, warmup_steps=2) for step in range(6)]
    falling = [0.4 * (1 + math.cos(angle)) for angle in (0, math.pi / 4, math.pi / 2, 3 * math.pi / 4)]
    np.testing.assert_allclose(rates, [0.4, 0.8, *falling])


@given(st.data(), st.integers(1, 5000), st.floats(1e-6, 10))
def test_a_cosine_climbs_to_the_base_rate_and_falls_towards_0(data, total, base):
    warmup = data.draw(st.integers(0, total - 1))
    rates = [cosine_rate_at(step, total, base, warmup) for step in range(total)]
    assert all(0 < rate <= base for rate in rates)
    assert rates[warmup] == base
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a > b for a, b in itertools.pairwise(rates[warmup:]))
    middle, odd = divmod(total - warmup, 2)
    if not odd:
        assert rates[warmup + middle] == pytest.approx(base / 2)


@pytest.mark.parametrize(("step", "warmup"), [(-1, 0), (10, 0), (3, 10)])
def test_a_cosine_refuses_steps_outside_the_training(step, warmup):
    with pytest.raises(ValueError, match="the training has 10 steps"):
        cosine_rate_at(step, 10, 0.1, warmup)


def test_the_recipe_chooses_the_schedule():
    steps = OptimizerConfig(learning_rate=0.1, milestones=((2, 0.01),), warmup_epochs=1)
    cosine = OptimizerConfig(learning_rate=0.1, schedule="cosine", warmup_epochs=1)
    for step in range(12):
        assert scheduled_rate(step, 4, 12, steps) == learning_rate_at(step, 4, 0.1, [(2, 0.01)], 1)
        assert scheduled_rate(step, 4, 12, cosine) == cosine_rate_at(step, 12, 0.1, warmup_steps=4)
    # A warm-up that rounds up to the whole of a short training leaves its last step at the full rate.
    late = OptimizerConfig(learning_rate=0.1, schedule="cosine", warmup_epochs=0.9)
    assert [scheduled_rate(step, 2, 2, late) for step in range(2)] == [0.1, 0.1]


class Quadratic(nn.Module):
    """Three float64 weights w and the loss Σ aw²/2, whose gradient is aw."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.a = torch.tensor([0.3, 1.0, -4.0], dtype=torch.float64)

    def forward(self):
        return (self.a * self.w**2).sum() / 2


def two_steps(model, optimizer, rates):
    for rate in rates:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return model.w.detach().numpy()


RATES, DECAY = (0.1, 0.05), 0.01


def test_adam_steps_by_hand_with_l2_in_the_gradient():
    model = Quadratic()
    w, a = model.w.detach().numpy().copy(), model.a.numpy()
    m = v = np.zeros(3)
    for t, rate in enumerate(RATES, start=1):
        gradient = a * w + DECAY * w
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        w = w - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    reached = two_steps(model, make_optimizer(model, "adam", DECAY), RATES)
    np.testing.assert_allclose(reached, w, rtol=1e-12)

    other = Quadratic()
    decoupled = two_steps(other, torch.optim.AdamW(other.parameters(), weight_decay=DECAY), RATES)
    assert np.abs(reached - decoupled).max() > 1e-4


def test_adamw_steps_by_hand_with_decoupled_decay():
    model = Quadratic()
    w, a = model.w.detach().numpy().copy(), model.a.numpy()
    m = v = np.zeros(3)
    for t, rate in enumerate(RATES, start=1):
        gradient = a * w
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        w = w * (1 - rate * DECAY) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    optimizer = make_optimizer(model, "adamw", DECAY)
    init_moments(optimizer)
    np.testing.assert_allclose(two_steps(model, optimizer, RATES), w, rtol=1e-12)


def test_sgd_steps_by_hand():
    model = Quadratic()
    w, a = model.w.detach().numpy().copy(), model.a.numpy()
    velocity = np.zeros(3)
    for rate in RATES:
        velocity = 0.8 * velocity + (a * w + DECAY * w)
        w = w - rate * velocity
    reached = two_steps(model, make_optimizer(model, "sgd", DECAY, momentum=0.8), RATES)
    np.testing.assert_allclose(reached, w, rtol=1e-12)


def test_the_decay_scope_reaches_the_optimiser():
    model = create_model("cifar_resnet20", 10, seed=0)
    optimizer = make_optimizer(model, "adam", 2e-4, decay_scope="residual_convs", lr=0.5)
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [
        (2e-4, 0.5),
        (0.0, 0.5),
    ]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_tensor_rate_is_changed_in_place():
    optimizer = make_optimizer(Quadratic(), "adam", 0.0)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(ValueError, match="'lamb'"):
        make_optimizer(Quadratic(), "lamb", 0.0)
