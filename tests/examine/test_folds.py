"""Folds that keep groups together: exact properties, and a balance no worse than scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import DataError
from trainer.examine.folds import stratified_group_folds


def spread(labels: np.ndarray, folds: np.ndarray, k: int) -> int:
    """The largest difference of two folds in their number of samples of a class."""
    counts = np.array([np.bincount(labels[folds == fold], minlength=labels.max() + 1) for fold in range(k)])
    return int(np.ptp(counts, axis=0).max())


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 9), st.data())
def test_groups_stay_together_and_singles_level_the_classes(k: int, seed: int, data: st.DataObject) -> None:
    labels = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=1, max_size=80)))
    groups = np.array(data.draw(st.lists(st.integers(0, 90), min_size=len(labels), max_size=len(labels))))
    if len(np.unique(groups)) < k:
        with pytest.raises(DataError, match="too few"):
            stratified_group_folds(labels, groups, k, seed)
        return
    folds = stratified_group_folds(labels, groups, k, seed)
    assert folds.dtype == np.int64
    assert set(folds) == set(range(k))
    for group in np.unique(groups):
        assert len(set(folds[groups == group])) == 1
    np.testing.assert_array_equal(folds, stratified_group_folds(labels, groups, k, seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(0, 9), st.lists(st.integers(0, 3), min_size=6, max_size=80))
def test_without_groups_classes_and_folds_differ_by_one(k: int, seed: int, drawn: list[int]) -> None:
    labels = np.array(drawn)
    folds = stratified_group_folds(labels, np.arange(len(labels)), k, seed)
    assert spread(labels, folds, k) <= 1
    assert np.ptp(np.bincount(folds, minlength=k)) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_the_balance_is_as_good_as_that_of_scikit_learn(seed: int) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    random = np.random.default_rng(seed)
    labels = random.choice(6, 1500, p=[0.5, 0.2, 0.1, 0.1, 0.06, 0.04])
    groups = np.where(random.random(1500) < 0.4, random.integers(0, 150, 1500), 1000 + np.arange(1500))
    oracle = np.zeros(1500, int)
    splits = selection.StratifiedGroupKFold(5, shuffle=True, random_state=seed).split(labels, labels, groups)
    for fold, (_, held_out) in enumerate(splits):
        oracle[held_out] = fold
    folds = stratified_group_folds(labels, groups, 5, seed)
    assert spread(labels, folds, 5) <= max(2, spread(labels, oracle, 5))
    assert not np.array_equal(folds, stratified_group_folds(labels, groups, 5, seed + 1))
