"""The guard steps on finite numbers only, counts what it skips, and gives up after ten skips in a row."""

import pytest
import torch
from torch import nn

from shards.errors import InputError
from trainer.distributed.world import SINGLE_PROCESS
from trainer.training.engines.plain import PlainEngine
from trainer.training.finite_guard import FiniteGuard, NonFiniteError
from trainer.training.optim import init_moments

RATE = 0.1
NAN, INF = float("nan"), float("inf")


def trained(kind):
    """Three weights after one ordinary step, so that the optimiser has moments to spoil."""
    weights = [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.ones(1))]
    build = torch.optim.Adam if kind == "adam" else torch.optim.SGD
    options = {} if kind == "adam" else {"momentum": 0.9}
    optimizer = build(weights, lr=0.1, weight_decay=0.01, fused=True, **options)
    init_moments(optimizer)
    give(weights, 0.5)
    optimizer.step()
    return weights, optimizer


def step(guard, weights, optimizer, loss):
    """What a task's update does with an engine and the guard; whether the step was made."""
    engine = PlainEngine(nn.ParameterList(weights), optimizer, SINGLE_PROCESS, None)
    finite = engine.gradients_finite() & torch.isfinite(torch.tensor(loss))
    engine.set_rate(RATE)
    engine.step(finite)
    guard.note(finite)
    guard.require_finite()
    return bool(finite)


def give(weights, value, at=None):
    """Gradients of 1, but `value` in one place; the last weight has none."""
    for weight in weights[:2]:
        weight.grad = torch.ones_like(weight)
    weights[0].grad[1] = value
    if at is not None:
        weights[1].grad.fill_(at)


def everything(weights, optimizer):
    moments = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    return [torch.as_tensor(value).clone() for value in [*weights, *moments]]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("loss", "gradient", "other"),
    [
        (NAN, 1.0, None),
        (INF, 1.0, None),
        (-INF, 1.0, None),
        (1.0, NAN, None),
        (1.0, INF, None),
        (1.0, -INF, None),
        (-INF, INF, None),
        (1.0, INF, -INF),
        (NAN, NAN, NAN),
    ],
)
def test_nothing_moves_on_a_number_that_is_not_finite(kind, loss, gradient, other):
    weights, optimizer = trained(kind)
    give(weights, gradient, other)
    before, guard = everything(weights, optimizer), FiniteGuard()
    assert step(guard, weights, optimizer, loss) is False
    after = everything(weights, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert guard.state() == {"skipped": 1, "in_a_row": 1}


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_finite_step_is_the_optimisers_own(kind):
    weights, optimizer = trained(kind)
    plain, other = trained(kind)
    guard = FiniteGuard()
    give(weights, -0.3)
    give(plain, -0.3)
    assert step(guard, weights, optimizer, 2.0) is True
    other.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, plain, strict=True))
    assert guard.state() == {"skipped": 0, "in_a_row": 0}


def test_ten_in_a_row_end_the_training_with_what_to_do():
    weights, optimizer = trained("sgd")
    guard = FiniteGuard()
    before = weights[0].detach().clone()
    give(weights, NAN)
    for _ in range(9):
        assert not step(guard, weights, optimizer, 1.0)
    with pytest.raises(NonFiniteError, match=r"10 steps in a row.*Lower optimizer\.learning_rate") as caught:
        step(guard, weights, optimizer, 1.0)
    assert isinstance(caught.value, InputError)  # a message, not a traceback
    assert torch.equal(weights[0], before)


def test_a_finite_step_starts_the_row_anew():
    weights, optimizer = trained("sgd")
    guard = FiniteGuard()
    for _ in range(3):
        for _ in range(9):
            give(weights, NAN)
            step(guard, weights, optimizer, 1.0)
        give(weights, 1.0)
        assert step(guard, weights, optimizer, 1.0)
    assert guard.state() == {"skipped": 27, "in_a_row": 0}


def test_the_count_survives_a_restart():
    weights, optimizer = trained("sgd")
    give(weights, NAN)
    first, second = FiniteGuard(), FiniteGuard()
    for _ in range(6):
        step(first, weights, optimizer, 1.0)
    second.load(first.state())
    assert second.state() == {"skipped": 6, "in_a_row": 6}
    for _ in range(3):
        step(second, weights, optimizer, 1.0)
    with pytest.raises(NonFiniteError):
        step(second, weights, optimizer, 1.0)
