"""Training on mixed images: the loss is the weighted mean of the losses of both labels."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.toy_networks import (
    CLASSES,
    assert_same_network,
    batch_of,
    descend,
    linear,
    losses_of,
    setting,
    step_at,
)
from trainer.loading.batch import BatchMix
from trainer.methods.losses import target_losses
from trainer.methods.standard import StandardTask
from trainer.methods.targets import agreement, mix_pairs

shares_of = st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8)
labels_of = st.lists(st.integers(0, CLASSES - 1), min_size=8, max_size=8)


def mixed_batch(rows=8, real=None, seed=0):
    batch = batch_of(rows, real, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    partners = torch.randint(rows if real is None else real, (rows,), generator=generator)
    return replace(batch, mix=BatchMix(partners, torch.rand(rows, generator=generator)))


def mixed_images(batch):
    share = batch.mix.shares[:, None, None, None]
    return share * batch.images + (1 - share) * batch.images[batch.mix.partners]


def mixed_losses(network, batch, rows):
    """The two losses of each row, written out."""
    share, partners = batch.mix.shares[:rows], batch.mix.partners[:rows]
    images = mixed_images(batch)[:rows]
    own = losses_of(network, images, batch.labels[:rows])
    other = losses_of(network, images, batch.labels[partners])
    return share * own + (1 - share) * other


@pytest.mark.parametrize("micro", [None, 3])
def test_a_step_is_the_gradient_of_the_mean_of_both_losses(micro):
    network, batch = linear(1), mixed_batch(8, real=5)
    task = StandardTask(copy.deepcopy(network), setting(micro=micro))
    values = task.step(batch, step_at(5))
    trained = copy.deepcopy(network)
    expected = mixed_losses(trained, batch, 5).mean()
    expected.backward()
    descend(trained)
    assert_same_network(task.module, trained)
    torch.testing.assert_close(values["loss"], expected.detach())
    predicted = network(mixed_images(batch)[:5]).argmax(1)
    share, partners = batch.mix.shares[:5], batch.labels[batch.mix.partners[:5]]
    right = share * (predicted == batch.labels[:5]) + (1 - share) * (predicted == partners)
    torch.testing.assert_close(values["train_accuracy"], right.mean())


def test_shares_of_1_train_as_without_mixup():
    network, batch = linear(1), mixed_batch(8)
    whole = replace(batch, mix=BatchMix(batch.mix.partners, torch.ones(8)))
    tasks = [StandardTask(copy.deepcopy(network), setting()) for _ in range(2)]
    for task, rows in zip(tasks, (whole, replace(batch, mix=None)), strict=True):
        task.step(rows, step_at(8))
    assert_same_network(tasks[0].module, tasks[1].module)


@given(labels_of, labels_of, shares_of)
@settings(max_examples=60, deadline=None)
def test_targets_are_probabilities_of_the_two_labels(labels, partners, shares):
    given_labels, other, share = torch.tensor(labels), torch.tensor(partners), torch.tensor(shares)
    targets = mix_pairs(given_labels, other, share, CLASSES)
    assert targets.shape == (8, CLASSES)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    rows = torch.arange(8)
    same = given_labels == other
    torch.testing.assert_close(targets[rows, given_labels], torch.where(same, 1.0, share))
    torch.testing.assert_close(targets[rows, other], torch.where(same, 1.0, 1 - share))
    logits = torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(3))
    expected = share * target_losses(logits, given_labels) + (1 - share) * target_losses(logits, other)
    torch.testing.assert_close(target_losses(logits, targets), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_hot_targets_are_labels(dtype):
    logits, labels = torch.randn(6, CLASSES).to(dtype), torch.arange(6) % CLASSES
    hard, soft = target_losses(logits, labels), target_losses(logits, torch.eye(CLASSES)[labels])
    assert hard.dtype == soft.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(hard, soft)
    assert torch.equal(agreement(logits, labels), agreement(logits, torch.eye(CLASSES)[labels]) == 1)


def test_smoothing_spreads_the_target_over_all_classes():
    logits, labels = torch.randn(6, CLASSES), torch.arange(6) % CLASSES
    spread = 0.9 * torch.eye(CLASSES)[labels] + 0.1 / CLASSES
    expected = target_losses(logits, spread)
    torch.testing.assert_close(target_losses(logits, labels, smoothing=0.1), expected)
    torch.testing.assert_close(target_losses(logits, torch.eye(CLASSES)[labels], smoothing=0.1), expected)
