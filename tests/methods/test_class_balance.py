"""The penalty on neglected classes: its values and gradients, and what it is for."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES
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
from trainer.config.schema import OptimizerConfig
from trainer.loading.batch import Batch, MixedLabels
from trainer.methods.losses import imbalance
from trainer.methods.standard import StandardTask
from trainer.methods.targets import class_counts
from trainer.run.recipe import load_recipe

DEMO = RECIPES / "demo.yaml"
counts = st.lists(st.integers(0, 20), min_size=3, max_size=3).filter(any)
positive = st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3)


def test_values_by_hand():
    found = imbalance(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor(-2 * math.log(3 / 4) - 2 * math.log(1 / 4)))


@given(counts, positive)
def test_it_is_smallest_where_predictions_are_as_frequent_as_labels(labels, other):
    rows = torch.tensor(labels, dtype=torch.float64)
    predicted = torch.tensor(other, dtype=torch.float64)
    predicted = predicted / predicted.sum() * rows.sum()
    assert imbalance(predicted, rows) >= imbalance(rows, rows) - 1e-9


def test_a_class_that_is_never_predicted_has_a_finite_gradient():
    predicted = torch.tensor([4.0, 0.0], requires_grad=True)
    imbalance(predicted, torch.tensor([2.0, 2.0])).backward()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


def test_counts_of_labels_and_of_mixed_labels():
    labels, weights = torch.tensor([0, 2, 2, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert class_counts(labels, weights, 4).tolist() == [1, 0, 2, 0]
    mixed = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])
    assert class_counts(mixed, torch.ones(2), 3).tolist() == [0.5, 0.75, 0.75]


def written_out(network, batch, parts, balance):
    """The mean loss of the real rows, plus the penalty of each part of them."""
    real = torch.cat(parts)
    loss = losses_of(network, batch.images[real], batch.labels[real]).mean()
    for part in parts:
        mean = network(batch.images[part]).softmax(1).mean(0)
        loss = loss - balance * mean.log()[batch.labels[part]].sum() / len(real)
    return loss


@pytest.mark.parametrize(
    ("micro", "parts"), [(None, [[0, 1, 2, 3, 4]]), (4, [[0, 1, 2, 3], [4]]), (3, [[0, 1], [2, 3, 4]])]
)
def test_a_step_takes_its_gradient_in_each_micro_batch(micro, parts):
    """The rows from 5 on have weight 0."""
    network, batch = linear(1), batch_of(8, real=5)
    task = StandardTask(copy.deepcopy(network), setting(micro=micro, class_balance=0.5))
    report = task.step(batch, step_at(5))
    expected = copy.deepcopy(network)
    written_out(expected, batch, [torch.tensor(part) for part in parts], 0.5).backward()
    descend(expected)
    assert_same_network(task.module, expected)
    without = losses_of(network, batch.images[:5], batch.labels[:5]).mean()
    torch.testing.assert_close(report["loss"], without.detach())  # the penalty is not a part of the loss of the rows


def test_mixed_labels_are_counted_by_their_shares():
    network, batch = linear(1), batch_of(8)
    whole = replace(batch, mixed=MixedLabels(batch.labels.roll(-1), torch.ones(8)))
    tasks = [StandardTask(copy.deepcopy(network), setting(class_balance=1.0)) for _ in range(2)]
    for task, each in zip(tasks, (batch, whole), strict=True):
        task.step(each, step_at(8))
    assert_same_network(tasks[0].module, tasks[1].module)


def share_predicted(balance: float) -> float:
    """Learn labels of which a third is right from a start that neglects the last class; return how often the network
    then predicts it."""
    generator = torch.Generator().manual_seed(0)
    true = torch.arange(512) % CLASSES
    images = torch.randn(512, 3, 2, 2, generator=generator) * 0.3
    images.view(512, 12)[torch.arange(512), true] += 2.0
    wrong = (true + torch.randint(1, CLASSES, (512,), generator=generator)) % CLASSES
    labels = torch.where(torch.rand(512, generator=generator) < 0.34, true, wrong)
    network = linear(1)
    network[1].bias.data[-1] = -6.0
    sgd = OptimizerConfig(kind="sgd", momentum=0.0, learning_rate=0.2)
    task = StandardTask(network, setting(sgd, gce_q=0.7, class_balance=balance))
    for step in range(200):
        rows = torch.randint(512, (64,), generator=generator)
        task.step(Batch(rows, images[rows], labels[rows], torch.ones(64)), step_at(64, step=step))
    return float((network(images).argmax(1) == CLASSES - 1).float().mean())


def test_a_neglected_class_is_learnt():
    assert share_predicted(balance=0.0) < 0.05
    assert share_predicted(balance=1.0) == pytest.approx(1 / CLASSES, abs=0.08)


def test_only_trainings_on_the_given_labels_take_it():
    recipe = load_recipe(DEMO, ["incv.class_balance=1", "standard.class_balance=0.5"])
    assert recipe.incv is not None
    assert (recipe.incv.class_balance, recipe.section("standard").class_balance) == (1.0, 0.5)
    with pytest.raises(ConfigError, match=r"coteaching\.class_balance"):
        load_recipe(DEMO, ["coteaching.class_balance=1"])


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"incv\.class_balance"):
        load_recipe(DEMO, ["incv.class_balance=-1"])
