"""LID by hand and its properties, the samples it is measured on, the turning point, and α."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.methods.dimensionality import draw_batches, estimate_lid, is_turning_point, label_share, mean_lid

quick = settings(max_examples=60, deadline=None)
log = math.log


def lid(points, neighbours):
    return estimate_lid(torch.tensor(points, dtype=torch.float32)[:, None], neighbours)


def test_lid_by_hand():
    """The distances are 1 and 3, 1 and 2, 2 and 3."""
    assert lid([0, 1, 3], 2) == pytest.approx((2 / log(3) + 2 / log(2) + 2 / log(1.5)) / 3)
    assert lid([0, 1, 3], 20) == lid([0, 1, 3], 2)  # there are no more neighbours
    # The nearest two of four: 1 and 3; 1 and 2; 2 and 3; 8 and 10.
    expected = (2 / log(3) + 2 / log(2) + 2 / log(1.5) + 2 / log(10 / 8)) / 4
    assert lid([0, 1, 3, 11], 2) == pytest.approx(expected)


def test_rows_at_distance_0_are_no_neighbours():
    """0 twice: its neighbours are 1 and 3; those of 1 are both zeros and 3, those of 3 are 1 and both zeros."""
    of_1, of_3 = 3 / (2 * log(2)), 3 / (log(3) - log(2))
    assert lid([0, 0, 1, 3], 20) == pytest.approx((2 * 2 / log(3) + of_1 + of_3) / 4)


def test_rows_whose_neighbours_are_equally_far_have_no_estimate():
    """0 has two neighbours at distance 1; 1 and -1 have theirs at 1 and 2."""
    assert lid([0, 1, -1], 2) == pytest.approx(2 / log(2))


@pytest.mark.parametrize("points", [[0, 0, 0, 0], [0, 1], [5], [0, 0, 1, 1]])
def test_without_distances_that_differ_there_is_no_lid(points):
    assert lid(points, 20) is None


@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 6), st.integers(2, 25), st.booleans())
@quick
def test_lid_is_finite_positive_and_depends_on_distances_alone(seed, rows, width, neighbours, coarse):
    features = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    features = (2 * features).round() if coarse else features  # coarse: with equal rows and equal distances
    found = estimate_lid(features, neighbours)
    if found is None:
        assert coarse or rows < 3
        return
    assert math.isfinite(found)
    assert found > 0
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert estimate_lid(features[order] * 3 + 1, neighbours) == pytest.approx(found)


def test_lid_tells_the_dimension():
    """Of points in a cube of 2, 4 and 8 dimensions, embedded in 10."""
    draws = torch.Generator().manual_seed(0)
    found = []
    for dimension in (2, 4, 8):
        features = torch.zeros(2000, 10)
        features[:, :dimension] = torch.rand(2000, dimension, generator=draws)
        found.append(estimate_lid(features, 20))
    assert found[0] == pytest.approx(2, abs=0.4)
    assert found[0] < found[1] < found[2] < 10


def test_the_mean_is_over_batches_and_leaves_out_what_could_not_be_read():
    """Of the batch (2, 5, 9) all are there, of (1, 4, 7) two, of (3, 8) one."""
    ids = np.array([1, 2, 4, 5, 8, 9])
    features = torch.tensor([0.0, 0.0, 1.0, 1.0, 7.0, 3.0])[:, None]
    batches = [np.array([9, 2, 5]), np.array([4, 1, 7]), np.array([3, 8])]
    assert mean_lid(features, ids, batches, 20) == pytest.approx(lid([0, 1, 3], 2))
    both = mean_lid(features, ids, [batches[0], np.array([1, 4, 8])], 20)
    assert both == pytest.approx((lid([0, 1, 3], 2) + lid([0, 1, 7], 2)) / 2)
    assert mean_lid(features[:0], ids[:0], batches, 20) is None


@given(st.integers(0, 2**32), st.integers(0, 200), st.integers(1, 300), st.integers(1, 20), st.integers(1, 10))
@quick
def test_measured_samples_are_whole_batches_of_different_ones(stream, epoch, count, rows, batches):
    samples = np.arange(count) * 3
    drawn = draw_batches(stream, epoch, samples, rows, batches)
    every = np.concatenate(drawn)
    assert len(set(every.tolist())) == len(every)
    assert set(every.tolist()) <= set(samples.tolist())
    if count < rows:
        assert [len(batch) for batch in drawn] == [count]
    else:
        assert [len(batch) for batch in drawn] == [rows] * min(batches, count // rows)
    again = draw_batches(stream, epoch, samples[::-1].copy(), rows, batches)
    assert all(np.array_equal(one, other) for one, other in zip(drawn, again, strict=True))


def test_every_epoch_has_other_samples():
    first, second = (draw_batches(5, epoch, np.arange(5000), 128, 10) for epoch in (0, 1))
    assert len(first) == 10
    assert len(np.intersect1d(np.concatenate(first), np.concatenate(second))) < 500


STEADY = [3.0, 5.0, 4.0, 3.0, 5.0]  # mean 4, standard deviation sqrt(0.8)


@pytest.mark.parametrize(
    ("last", "turns"), [(4 + 2 * math.sqrt(0.8) + 1e-9, True), (4 + 2 * math.sqrt(0.8) - 1e-9, False), (2.0, False)]
)
def test_the_training_turns_above_mean_and_two_deviations(last, turns):
    assert is_turning_point([9.0, *STEADY, last], epochs=7, initial=2, window=5) is turns


@pytest.mark.parametrize(("epochs", "initial"), [(45, 40), (46, 40), (5, 0), (5, -1)])
def test_no_turn_before_a_whole_window_after_the_initial_epochs(epochs, initial):
    history = [1.0] * (epochs - 1) + [100.0]
    assert is_turning_point(history, epochs, initial, 5) is (epochs >= initial + 5 and epochs > 5)


def test_alpha_by_hand():
    assert label_share([4.0, 2.0, 3.0], epochs=60, total=120) == pytest.approx(math.exp(-0.5 * 3 / 2))
    assert label_share([2.0], epochs=0, total=120) == 1.0


@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=30), st.integers(1, 200))
@quick
def test_alpha_is_a_share_that_falls_with_the_lid(history, total):
    epochs = min(len(history), total)
    share = label_share(history, epochs, total)
    rounded_up = 1 + 1e-12
    assert 0 <= share <= math.exp(-epochs / total) * rounded_up
    assert label_share([*history[:-1], 2 * history[-1]], epochs, total) <= share * rounded_up
