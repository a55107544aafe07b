"""Clipping per network; the fp16 loss scale is searched without reporting divergence, and checkpointed."""

import copy

import pytest
import torch

from shards.errors import InputError
from tests.support.toy_networks import RATE, SGD, assert_same_network, batch_of, linear, losses_of, setting, step_at
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.standard import StandardTask
from trainer.models.twin import TwinModel

CLIPPED = SGD.model_copy(update={"clip": 0.05})


def norm_of_change(before: torch.nn.Module, after: torch.nn.Module) -> float:
    """Of the gradient that SGD without momentum stepped along."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return float(torch.cat([(old - new).detach().flatten() for old, new in pairs]).norm()) / RATE


def test_each_network_of_a_pair_is_clipped_by_itself() -> None:
    """The joint norm would be sqrt(2) of the limit, and a wild network would still a tame one."""
    wild, tame = linear(1), linear(2)
    with torch.no_grad():
        wild[1].weight *= 50
        tame[1].weight *= 0.01
    start = TwinModel(wild, tame)
    task = CoteachingTask(copy.deepcopy(start), setting(CLIPPED), ForgetSchedule(8, 0.0, 10), "one_pass")
    task.step(batch_of(8), step_at(8))
    for before, after in ((start.a, task.module.a), (start.b, task.module.b)):
        assert norm_of_change(before, after) == pytest.approx(0.05, rel=1e-3)


def test_a_small_gradient_is_not_clipped() -> None:
    network = linear(1)
    generous = SGD.model_copy(update={"clip": 1e3})
    ours, theirs = StandardTask(copy.deepcopy(network), setting(generous)), StandardTask(network, setting())
    for task in (ours, theirs):
        task.step(batch_of(8), step_at(8))
    assert_same_network(ours.module, theirs.module, atol=0)


def test_fp16_trains_what_fp32_trains() -> None:
    half, full = StandardTask(linear(1), setting(precision="fp16")), StandardTask(linear(1), setting())
    for step in range(5):
        for task in (half, full):
            task.step(batch_of(8, seed=step), step_at(8, step=step))
    assert_same_network(half.module, full.module, atol=2e-3)
    assert half.state().values["scaler"]["scale"] == 2.0**16
    batch = batch_of(8)
    assert losses_of(half.module, batch.images, batch.labels).dtype == torch.float32


def overflowing(scale: float) -> StandardTask:
    """One whose gradients leave fp16 until the scale is far below where it begins."""
    network = linear(1)
    task = StandardTask(network, setting(precision="fp16"))
    state = task.state()
    state.values["scaler"]["scale"] = scale
    task.load(state)
    return task


def test_a_scale_that_is_too_large_is_halved_and_the_step_left_out() -> None:
    task = overflowing(2.0**40)
    before = copy.deepcopy(task.module)
    for step in range(15):  # more than the guard would forgive a training that diverges
        task.step(batch_of(8), step_at(8, step=step))
    assert task.state().values["scaler"]["scale"] == 2.0**25
    assert task.state().values["guard"] == {"skipped": 15, "in_a_row": 0}
    assert_same_network(task.module, before, atol=0)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_loss_that_is_not_finite_is_a_divergence_at_any_scale(scale: float) -> None:
    """The loss itself is not scaled: a lower scale would not help."""
    task = overflowing(scale)
    batch = batch_of(8)
    batch.images[:] = torch.inf
    for step in range(9):
        task.step(batch, step_at(8, step=step))
    task.require_finite()
    task.step(batch, step_at(8, step=9))
    with pytest.raises(InputError, match="diverged"):
        task.require_finite()


def test_the_scale_comes_back_from_a_checkpoint() -> None:
    first, second = overflowing(2.0**40), StandardTask(linear(1), setting(precision="fp16"))
    first.step(batch_of(8), step_at(8))
    second.load(first.state())
    assert second.state().values["scaler"] == first.state().values["scaler"]
    assert second.state().values["scaler"]["scale"] == 2.0**39
