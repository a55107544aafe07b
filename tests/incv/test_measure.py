"""Measures of a selection, against worked examples and their own invariants."""

import math

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from trainer.incv import measure

TRUE = np.array([0, 0, 0, 0, 1, 1, 1, 2])
GIVEN = np.array([0, 0, 1, 2, 1, 1, 0, 2])
SELECTED = np.array([1, 0, 1, 0, 1, 1, 0, 0], dtype=bool)


def test_realised_noise_and_prior_by_hand() -> None:
    assert measure.realised_noise(TRUE, GIVEN) == 3 / 8
    np.testing.assert_allclose(measure.class_prior(TRUE, 3), [4 / 8, 3 / 8, 1 / 8])


def test_transition_by_hand() -> None:
    expected = [[2 / 4, 1 / 4, 1 / 4], [1 / 3, 2 / 3, 0], [0, 0, 1]]
    np.testing.assert_allclose(measure.confusion(TRUE, GIVEN, 3), expected)


def test_a_class_without_samples_has_no_row() -> None:
    matrix = measure.confusion(TRUE, GIVEN, 4)
    assert np.isnan(matrix[3]).all()
    assert matrix[0, 3] == 0
    assert measure.class_prior(TRUE, 4)[3] == 0


def test_unknown_predictions_count_nowhere() -> None:
    matrix = measure.confusion(np.array([0, 0, 1, -1]), np.array([0, -1, 0, 1]), 2)
    np.testing.assert_array_equal(matrix, [[1, 0], [1, 0]])


def test_precision_and_recall_by_hand() -> None:
    assert measure.label_precision(TRUE, GIVEN, SELECTED) == 3 / 4
    assert measure.label_recall(TRUE, GIVEN, SELECTED) == 3 / 5
    np.testing.assert_allclose(measure.label_precision_by_class(TRUE, GIVEN, SELECTED, 3), [1 / 2, 1, math.nan])
    np.testing.assert_allclose(measure.label_recall_by_class(TRUE, GIVEN, SELECTED, 3), [1 / 2, 1, 0])


def test_nothing_selected_has_no_precision() -> None:
    nothing = np.zeros(len(TRUE), dtype=bool)
    assert math.isnan(measure.label_precision(TRUE, GIVEN, nothing))
    assert measure.label_recall(TRUE, GIVEN, nothing) == 0
    empty = np.array([], dtype=np.int64)
    assert math.isnan(measure.realised_noise(empty, empty))


@pytest.mark.parametrize(("value", "kept"), [(math.nan, None), (math.inf, None), (0.25, 0.25), (0, 0.0)])
def test_or_none(value: float, kept: float | None) -> None:
    assert measure.or_none(value) == kept


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    classes = draw(st.integers(1, 6))
    rows = draw(
        st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1), st.booleans()), min_size=1)
    )
    true, given, selected = (np.array(column) for column in zip(*rows, strict=True))
    return true, given, selected, classes


@drawn(labelled())
def test_the_noise_is_what_the_transition_and_prior_say(case: tuple) -> None:
    true, given, _, classes = case
    matrix, prior = measure.confusion(true, given, classes), measure.class_prior(true, classes)
    present = prior > 0
    np.testing.assert_allclose(matrix[present].sum(axis=1), 1)
    stays = (prior[present] * np.diag(matrix)[present]).sum()
    assert math.isclose(measure.realised_noise(true, given), 1 - stays, abs_tol=1e-12)


@drawn(labelled())
def test_overall_figures_are_weighted_class_figures(case: tuple) -> None:
    true, given, selected, classes = case
    by_class = np.nan_to_num(measure.label_precision_by_class(true, given, selected, classes))
    weights = np.bincount(true[selected], minlength=classes)
    if selected.any():
        overall = measure.label_precision(true, given, selected)
        assert math.isclose(overall, (by_class * weights).sum() / selected.sum(), abs_tol=1e-12)
    recalls = np.nan_to_num(measure.label_recall_by_class(true, given, selected, classes))
    right = np.bincount(true[true == given], minlength=classes)
    if right.sum():
        recall = measure.label_recall(true, given, selected)
        assert math.isclose(recall, (recalls * right).sum() / right.sum(), abs_tol=1e-12)


@drawn(labelled())
def test_selecting_everything_recalls_everything(case: tuple) -> None:
    true, given, _, _ = case
    everything = np.ones(len(true), dtype=bool)
    precision, noise = measure.label_precision(true, given, everything), measure.realised_noise(true, given)
    assert math.isclose(precision, 1 - noise, abs_tol=1e-12)
    if (true == given).any():
        assert measure.label_recall(true, given, everything) == 1
