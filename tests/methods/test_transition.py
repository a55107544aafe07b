"""The transition matrix of F-correction: anchors below the percentile, over all samples, in any split of the rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import trainer.methods.transition
from shards.errors import DataError
from trainer.methods.transition import choose_anchors, estimate_transition, normalise_rows
from trainer.passes.table import SampleTable

quick = settings(max_examples=80, deadline=None)


def anchor_of(column, percentile):
    return int(choose_anchors(np.array([column], np.float32), percentile)[0])


@pytest.mark.parametrize(
    ("column", "percentile", "anchor"),
    [
        (np.arange(101) / 200, 97.0, 96),  # the 97th percentile is the 97th value, and 96 the largest below
        (np.arange(100, -1, -1) / 200, 97.0, 4),
        (np.arange(101) / 200, 100.0, 99),
        (np.arange(101) / 200, 50.0, 49),
        ([0.1, 0.5, 0.5, 0.9], 97.0, 1),  # of equal ones the first
        ([0.9, 0.2, 0.9, 0.9], 97.0, 1),  # equal to the percentile is not below it
        ([0.3, 0.3, 0.3], 97.0, 0),  # nothing is below
        ([0.9, 0.3, 0.3, 0.3], 50.0, 1),  # nothing below 0.3, which is the percentile: not the outlier
        ([0.7], 97.0, 0),
    ],
)
def test_anchors_by_hand(column, percentile, anchor):
    assert anchor_of(column, percentile) == anchor


probabilities = arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 60)),
    elements=st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0]) | st.floats(0, 1, width=32),
)


@given(probabilities, st.sampled_from([50.0, 90.0, 97.0, 99.5, 100.0]))
@quick
def test_anchors_are_the_largest_below_numpys_percentile(values, percentile):
    before = values.copy()
    anchors = choose_anchors(values, percentile)
    assert np.array_equal(values, before)  # choosing for one class must not change what another is chosen by
    for column, anchor in zip(values, anchors, strict=True):
        limit = np.sort(column)[int(np.ceil(percentile * (len(column) - 1) / 100))]
        assert limit == pytest.approx(np.percentile(column, percentile, method="higher")) or percentile == 99.5
        below = column[column < limit]
        expected = below.max() if len(below) else limit
        assert column[anchor] == expected
        assert anchor == np.flatnonzero(column == expected)[0]


def rows_of(count, classes=3, seed=0):
    draws = np.random.default_rng(seed)
    ids = draws.choice(5000, count, replace=False).astype(np.int64)
    return ids, normalise_rows(draws.random((count, classes)) ** 3).astype(np.float32)


def transition_of(ids, values, percentile=97.0):
    columns = {"probabilities": torch.from_numpy(values)}
    return estimate_transition(SampleTable.of(torch.from_numpy(ids), columns, "the pass"), percentile)


def by_hand(ids, values, percentile=97.0):
    """One class after the other, samples in the order of their ids."""
    order = np.argsort(ids)
    ids, values = ids[order], values[order]
    anchors = []
    for column in values.T:
        limit = np.percentile(column, percentile, method="higher")
        anchors.append(max((i for i in range(len(ids)) if column[i] < limit), key=lambda i: (column[i], -i)))
    matrix = values[anchors].astype(np.float64)
    return ids[anchors], matrix / matrix.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("block", [1, 7, 2**24])
def test_t_is_the_prediction_for_each_anchor(block, monkeypatch):
    monkeypatch.setattr(trainer.methods.transition, "_BLOCK", block * 240)
    rows = rows_of(240, classes=9)
    found = transition_of(*rows)
    anchors, matrix = by_hand(*rows)
    assert found.anchors.tolist() == anchors.tolist()
    assert np.array_equal(found.matrix, matrix)
    np.testing.assert_allclose(found.matrix.sum(axis=1), 1.0, rtol=1e-12)


def test_an_outlier_of_one_class_can_be_the_anchor_of_another():
    """The trap of zeroing outliers in place: the anchor's row would lose the outlier."""
    values = np.full((100, 2), 0.1, np.float32)
    values[[7, 20, 21], 0] = 0.99  # the three outliers of class 0, with a class 1 of 0.5 in one of them
    values[7, 1] = 0.5
    values[8, 0] = 0.2
    values[:3, 1] = 0.95
    found = transition_of(np.arange(100), values)
    assert found.anchors.tolist() == [8, 7]
    np.testing.assert_allclose(found.matrix[1], [0.99 / 1.49, 0.5 / 1.49], rtol=1e-6)


@given(st.permutations(list(range(12))))
@quick
def test_ties_go_by_sample_id_and_not_by_the_order_of_the_pass(order):
    values = np.array([[0.5, 0.5]] * 11 + [[0.9, 0.1]], np.float32)
    assert transition_of(np.arange(12)[order], values[order]).anchors.tolist() == [0, 11]


def test_no_usable_prediction_is_an_error():
    nothing = SampleTable(torch.empty(0, dtype=torch.int64), {})
    with pytest.raises(DataError, match=r"no training sample.*transition matrix"):
        estimate_transition(nothing, 97.0)
