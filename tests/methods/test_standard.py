"""Standard training: the mean over real rows, fp32 losses, bit-exact resume."""

import copy
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from shards.errors import DataError
from tests.support.toy_networks import (
    CLASSES,
    RATE,
    after_one_step,
    assert_same_network,
    batch_of,
    linear,
    losses_of,
    normed,
    setting,
    step_at,
)
from trainer.config.optimisation import OptimizerConfig
from trainer.distributed.world import World
from trainer.methods.losses import target_losses
from trainer.methods.standard import StandardTask
from trainer.training.finite_guard import NonFiniteError


def test_a_step_is_the_gradient_of_the_mean_loss_of_real_rows():
    network, batch = linear(1), batch_of(8, real=5)
    task = StandardTask(copy.deepcopy(network), setting())
    report = task.step(batch, step_at(5))
    assert_same_network(task.module, after_one_step(network, batch.images[:5], batch.labels[:5]))
    expected = losses_of(network, batch.images[:5], batch.labels[:5]).mean()
    torch.testing.assert_close(report["loss"], expected.detach())
    right = (network(batch.images[:5]).argmax(1) == batch.labels[:5]).float().mean()
    torch.testing.assert_close(report["train_accuracy"], right)


def twice(build):
    """The state after a step with, and with other, rows of weight 0."""
    batch = batch_of(8, real=5)
    other = replace(batch, images=batch.images.clone())
    other.images[5:] *= -3
    tasks = []
    for rows in (batch, other):
        task = StandardTask(build(1), setting())
        task.step(rows, step_at(5))
        tasks.append(task)
    return [task.module for task in tasks]


def test_rows_of_weight_0_do_not_count():
    first, second = twice(linear)
    assert_same_network(first, second, atol=0)


def test_rows_of_weight_0_are_seen_by_batchnorm():
    """Which is why they must show real images."""
    first, second = twice(normed)
    assert not torch.allclose(first[1].running_var, second[1].running_var)


def test_losses_are_fp32_also_under_bf16():
    logits = torch.randn(6, 4).bfloat16()
    losses = target_losses(logits, torch.arange(6) % 4)
    assert losses.dtype == torch.float32
    rows = logits.double()
    expected = rows.logsumexp(1) - rows[torch.arange(6), torch.arange(6) % 4]
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=1e-6)
    task = StandardTask(linear(1), setting(precision="bf16"))
    report = task.step(batch_of(8), step_at(8))
    assert report["loss"].dtype == torch.float32
    exact = StandardTask(linear(1), setting()).step(batch_of(8), step_at(8))["loss"]
    assert 0 < abs(report["loss"] - exact) < 0.05  # the forward did run in bf16


def test_the_rate_follows_the_schedule():
    optimizer = OptimizerConfig(kind="sgd", momentum=0.0, learning_rate=0.5, milestones=((1, 0.0001),))
    network, batch = linear(1), batch_of(8)
    task = StandardTask(copy.deepcopy(network), setting(optimizer))
    task.step(batch, step_at(8, epoch=1, step=5))
    assert task.learning_rate == 0.0001
    moved = (task.module[1].weight - network[1].weight).abs().max()
    assert 0 < moved < 0.001


def smoothed_by_hand(logits, labels, smoothing):
    """(1 - s) of the cross-entropy, and s of its mean over all classes: [rows]."""
    log_p = logits.log_softmax(1)
    return -(1 - smoothing) * log_p[torch.arange(len(labels)), labels] - smoothing * log_p.mean(1)


def test_smoothed_losses_by_hand():
    logits, labels = torch.randn(6, 4), torch.arange(6) % 4
    for smoothing in (0.0, 0.1, 0.7):
        expected = smoothed_by_hand(logits, labels, smoothing)
        torch.testing.assert_close(target_losses(logits, labels, smoothing), expected)
        soft = torch.nn.functional.one_hot(labels, 4).double()
        torch.testing.assert_close(target_losses(logits, soft, smoothing), expected)
    assert torch.equal(target_losses(logits, labels), target_losses(logits, labels))
    assert target_losses(logits.bfloat16(), labels, 0.1).dtype == torch.float32


def test_a_step_takes_the_gradient_of_smoothed_losses():
    network, batch = linear(1), batch_of(8, real=5)
    task = StandardTask(copy.deepcopy(network), setting(label_smoothing=0.2))
    report = task.step(batch, step_at(5))
    loss = smoothed_by_hand(network(batch.images[:5]), batch.labels[:5], 0.2).mean()
    torch.testing.assert_close(report["loss"], loss.detach())
    loss.backward()
    moved = network[1].weight - RATE * network[1].weight.grad
    torch.testing.assert_close(task.module[1].weight, moved)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_a_task_goes_on_from_its_state_bit_for_bit(kind):
    optimizer = OptimizerConfig(kind=kind, learning_rate=0.01, weight_decay=0.01)
    first = StandardTask(normed(1), setting(optimizer))
    for number in range(3):
        first.step(batch_of(8, seed=number), step_at(8, step=number))
    state = first.state()
    state.tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    second = StandardTask(normed(7), setting(optimizer))
    second.load(state)
    for task in (first, second):
        for number in range(3, 6):
            task.step(batch_of(8, seed=number), step_at(8, step=number))
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name


def test_a_non_finite_loss_moves_no_weight_and_ten_end_the_training():
    network, batch = linear(1), batch_of(8)
    batch.images[2] = torch.nan
    task = StandardTask(copy.deepcopy(network), setting())
    for number in range(9):
        task.step(batch, step_at(8, step=number))
    assert_same_network(task.module, network, atol=0)
    assert task.state().values["guard"] == {"skipped": 9, "in_a_row": 9}
    resumed = StandardTask(linear(2), setting())
    resumed.load(task.state())
    resumed.require_finite()
    resumed.step(batch, step_at(8, step=9))  # the count is part of the state
    with pytest.raises(NonFiniteError, match="learning_rate"):
        resumed.require_finite()


class Pair(World):
    """The first of two ranks; the other has the same."""

    def gather_to_rank0(self, tensor):
        return torch.stack([tensor, tensor])


def task_of_two(network):
    return StandardTask(network, dataclasses.replace(setting(), world=Pair(0, 2, torch.device("cpu"), 1)))


def test_statistics_of_another_network_are_refused():
    task, state = task_of_two(normed(1)), task_of_two(normed(1)).state()
    state.tensors["ranks.buffers"] = state.tensors["ranks.buffers"][:, :-4]
    with pytest.raises(DataError, match=r"36 bytes.*this network has 40.*--redo"):
        task.load(state)


def test_statistics_go_by_name_and_not_by_the_order_of_the_networks_code():
    def network(first, second):
        made = nn.Sequential(nn.Conv2d(3, 5, 1), nn.Flatten(), nn.Linear(20, CLASSES))
        for name in (first, second):
            made.register_buffer(name, torch.full((3,), float(ord(name))))
        return made

    saved, other = task_of_two(network("a", "b")), task_of_two(network("b", "a"))
    other.module.a.zero_()
    other.load(saved.state())
    assert other.module.a.tolist() == [97.0] * 3
    assert other.module.b.tolist() == [98.0] * 3


def test_buffers_that_a_network_does_not_save_are_no_statistics():
    network = normed(1)
    network.register_buffer("table", torch.ones(3), persistent=False)
    task = task_of_two(network)
    state = task.state()
    assert "model.table" not in state.tensors
    task.load(state)
