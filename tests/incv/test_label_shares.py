"""`match_label_shares`: held-out predictions whose mean probabilities are the classes' shares of the given labels."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.digits_bench import Bench, network_of, same
from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.label_shares import match_shares, shift_logits, sum_probabilities
from trainer.incv.predictions import Predictions
from trainer.loading.batch import Batch
from trainer.models.factory import create_model

CLASSES = 5
logits_of = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).normal(0, 1, (200, CLASSES)))
labels_of = st.lists(st.integers(0, CLASSES - 1), min_size=200, max_size=200).map(np.array)


def passes(logits: np.ndarray, rows: int, weights: np.ndarray | None = None):
    """The batches of a predict pass, whose last one is filled up."""
    count = -(-len(logits) // rows) * rows
    ids = np.where(np.arange(count) < len(logits), np.arange(count), -1)
    every = torch.from_numpy(np.resize(logits, (count, logits.shape[1])))
    weight = torch.from_numpy((ids >= 0) * (1.0 if weights is None else np.resize(weights, count)))
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        images, labels = torch.zeros(rows, 3, 1, 1), torch.zeros(rows, dtype=torch.long)
        yield Batch(torch.from_numpy(ids[part]), images, labels, weight[part]), [every[part]]


def mean_of(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(1).mean(0).numpy()


def shares_of(labels: np.ndarray) -> np.ndarray:
    return (np.bincount(labels, minlength=CLASSES) + 1) / (len(labels) + CLASSES)


@given(logits_of, st.integers(1, 250))
def test_sums_do_not_depend_on_the_batches(logits, rows):
    found = sum_probabilities(passes(logits, rows), CLASSES)
    np.testing.assert_allclose(found[:-1], 200 * mean_of(logits), rtol=1e-12)
    assert found[-1] == 200


def test_unreadable_and_non_finite_rows_do_not_count():
    logits = np.random.default_rng(0).normal(size=(6, CLASSES))
    weights = np.array([1, 1, 0, 1, 1, 1.0])
    whole = sum_probabilities(passes(logits[[0, 1, 4, 5]], 4), CLASSES)
    logits[3, 2] = np.nan
    logits[2] = np.inf
    torch.testing.assert_close(sum_probabilities(passes(logits, 4, weights), CLASSES), whole)


def test_a_rank_without_rows_adds_nothing():
    assert sum_probabilities(iter(()), CLASSES).tolist() == [0.0] * (CLASSES + 1)


@given(labels_of, st.lists(st.floats(-10, 10), min_size=CLASSES, max_size=CLASSES))
def test_predictions_that_do_not_depend_on_the_image_get_exactly_the_shares_of_the_labels(labels, row):
    logits = np.tile(np.array(row), (200, 1))
    shift = match_shares(sum_probabilities(passes(logits, 64), CLASSES), labels)
    np.testing.assert_allclose(mean_of(logits + shift.numpy()), shares_of(labels), rtol=1e-4)


@given(logits_of, labels_of)
def test_mean_probabilities_come_closer_to_the_shares_of_the_labels(logits, labels):
    shift = match_shares(sum_probabilities(passes(logits, 64), CLASSES), labels)
    before, after = (np.abs(mean_of(each) - shares_of(labels)).sum() for each in (logits, logits + shift.numpy()))
    assert after <= before + 1e-6


@given(logits_of)
def test_predictions_that_match_the_labels_already_are_kept(logits):
    sums = sum_probabilities(passes(logits, 64), CLASSES)
    labels = np.repeat(np.arange(CLASSES), np.round(1e6 * mean_of(logits)).astype(int))
    assert match_shares(sums, labels).abs().max() < 1e-4


def test_a_class_that_the_network_has_given_up_is_predicted_again():
    """Class 2 is likelier than usual for half of the samples, but never the likeliest one."""
    logits = np.zeros((200, CLASSES))
    logits[:100, 2] = 1.0
    logits[:, 2] -= 3.0
    shift = match_shares(sum_probabilities(passes(logits, 64), CLASSES), np.arange(200) % CLASSES)
    ((_, (shifted,)),) = shift_logits(passes(logits, 200), shift)
    assert (torch.from_numpy(logits).argmax(1) != 2).all()
    assert (shifted.argmax(1) == 2).tolist() == [True] * 100 + [False] * 100


@pytest.mark.usefixtures("one_thread")
def test_incv_judges_by_the_shifted_logits_of_the_same_networks(bench: Bench):
    overrides = ("incv.epochs=1", "incv.optimizer.learning_rate=0.0003")
    recipe = bench.recipe(*overrides, "incv.match_label_shares=true")
    data = bench.data(recipe)
    plain, matched = (bench.run(one, data) for one in (bench.recipe(*overrides), recipe))
    unshifted, shifted = (Predictions.read(run.round_predictions(0)) for run in (plain, matched))
    assert (unshifted.predicted != shifted.predicted).any()
    for fold in (0, 1):
        tensors = network_of(matched, 0, fold)
        assert same(tensors, network_of(plain, 0, fold))
        network = create_model(recipe.model.name, data.classes, 0)
        network.load_state_dict({name.removeprefix("model."): copy.copy(one) for name, one in tensors.items()})
        found = shifted.of_fold(fold)
        (batch,) = data.loader.batches(data.predict_requests(found.sample_id, len(found.sample_id), SINGLE_PROCESS))
        with torch.no_grad():
            p = network.eval()(batch.images).softmax(1).double()[batch.ids.argsort()]
        given = np.bincount(data.labels[found.sample_id], minlength=data.classes) + 1
        expected = p / p.mean(0) * torch.from_numpy(given / given.sum())
        expected = (expected / expected.sum(1, keepdim=True)).numpy()
        np.testing.assert_array_equal(found.predicted, expected.argmax(1))
        np.testing.assert_array_equal(found.agrees, expected.argmax(1) == data.labels[found.sample_id])
        at_label = expected[np.arange(len(expected)), data.labels[found.sample_id]]
        np.testing.assert_allclose(found.given_probability, at_label, rtol=1e-4)
        np.testing.assert_allclose(found.loss, -np.log(at_label), rtol=1e-4)
