"""The paper's formulas: hand values, inverses, bounds, and a simulation of the paper's own assumptions."""

import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support import paper_formulas
from trainer import theory

ratios = st.floats(0.0, 1.0)
class_counts = st.integers(2, 1000)


@st.composite
def noise_matrices(draw: st.DrawFn, most_classes: int = 8) -> NDArray[np.float64]:
    classes = draw(st.integers(2, most_classes))
    seed = draw(st.integers(0, 2**32 - 1))
    spread = draw(st.sampled_from([0.05, 0.3, 1.0, 10.0]))
    return np.random.default_rng(seed).dirichlet(np.full(classes, spread), size=classes)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- noise matrices


def test_transitions_by_hand():
    np.testing.assert_allclose(
        theory.symmetric_transition(0.3, 4),
        [[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7]],
    )
    np.testing.assert_allclose(
        theory.asymmetric_transition(0.4, 3), [[0.6, 0.4, 0.0], [0.0, 0.6, 0.4], [0.4, 0.0, 0.6]]
    )


@given(ratios, st.integers(2, 60))
def test_transitions_are_valid(ratio, classes):
    theory.check_transition(theory.symmetric_transition(ratio, classes))
    theory.check_transition(theory.asymmetric_transition(ratio, classes))
    inclusive = theory.inclusive_symmetric_transition(ratio, classes)
    theory.check_transition(inclusive)
    np.testing.assert_allclose(1 - inclusive.diagonal(), ratio * (classes - 1) / classes, atol=1e-12)
    theory.check_transition(theory.mapped_transition(ratio, {0: 1}, classes))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1.0, 0.0], [0.5, 0.4]], "row 1 .* sums to 0.9"),
        ([[1.2, -0.2], [0.0, 1.0]], r"row 0 .* 1.2, outside \[0, 1\]"),
        ([[1.0, 0.0], [float("nan"), 1.0]], "row 1 .* entry 0 is nan"),
        ([[1.0, 0.0]], r"square .* \(1, 2\)"),
        ([1.0], "square"),
        (np.zeros((0, 0)), "square"),
    ],
)
def test_a_bad_matrix_is_refused_naming_the_row(matrix, message):
    with pytest.raises(ValueError, match=message):
        theory.check_transition(matrix)
    with pytest.raises(ValueError, match=message):
        theory.accuracy(matrix, [1, 1])


def test_impossible_arguments_are_refused():
    identity = np.eye(3)
    with pytest.raises(ValueError, match=r"noise ratio is 1.5"):
        theory.symmetric_transition(1.5, 3)
    with pytest.raises(ValueError, match="at least 2"):
        theory.noise_of_selected(0.1, 1, "symmetric")
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        theory.accuracy(identity, [0.5, 0.5])
    with pytest.raises(ValueError, match="non-negative"):
        theory.label_recall(identity, [0.5, 0.7, -0.2])
    with pytest.raises(ValueError, match="cannot be negative"):
        theory.label_recall_after(identity, [1, 1, 1], rounds=-1)
    with pytest.raises(ValueError, match="agreement is nan"):
        theory.noise_from_accuracy(math.nan, 10)
    with pytest.raises(ValueError, match=r"less than the number of classes \(10\)"):
        theory.noise_from_accuracy(0.5, 10, top_k=10)
    with pytest.raises(ValueError, match="top-2"):
        theory.noise_from_accuracy(0.6, 10, "asymmetric", top_k=2)


# --- agreement and its inverse


def test_accuracy_by_hand():
    assert paper_formulas.symmetric_accuracy(0.5, 10) == pytest.approx(0.25 + 0.25 / 9)
    assert paper_formulas.asymmetric_accuracy(0.4) == pytest.approx(0.36 + 0.16)
    matrix = [[0.8, 0.2], [0.5, 0.5]]
    np.testing.assert_allclose(paper_formulas.accuracy_per_class(matrix), [0.68, 0.5])
    assert theory.accuracy(matrix, [0.25, 0.75]) == pytest.approx(0.25 * 0.68 + 0.75 * 0.5)
    assert theory.accuracy(matrix, [100, 300]) == pytest.approx(0.545)  # counts serve as well as shares


@given(ratios, st.integers(2, 50))
def test_closed_forms_are_special_cases_of_the_matrix_formulas(ratio, classes):
    prior = np.arange(1, classes + 1)
    symmetric = theory.symmetric_transition(ratio, classes)
    asymmetric = theory.asymmetric_transition(ratio, classes)
    assert theory.accuracy(symmetric, prior) == pytest.approx(paper_formulas.symmetric_accuracy(ratio, classes))
    assert theory.accuracy(asymmetric, prior) == pytest.approx(paper_formulas.asymmetric_accuracy(ratio))
    for matrix, kind in ((symmetric, "symmetric"), (asymmetric, "asymmetric")):
        selected_noise = theory.noise_of_selected(ratio, classes, kind)
        assert theory.label_precision(matrix, prior) == pytest.approx(1 - selected_noise)
        if ratio < 1:
            assert theory.label_recall(matrix, prior) == pytest.approx(1 - ratio)


@pytest.mark.parametrize(
    ("agreement", "classes", "kind", "top_k", "expected"),
    [
        (0.6, 50, "symmetric", 1, 0.226),  # 50 classes, as in the small WebVision
        (0.25 + 0.25 / 9, 10, "symmetric", 1, 0.5),
        (0.52, 10, "asymmetric", 1, 0.4),
        (0.25 + 0.25 / 4, 10, "symmetric", 2, 0.5),  # c/k - 1 = 4 in the place of c - 1
        (1.0, 10, "symmetric", 1, 0.0),
        (1.001, 10, "symmetric", 1, 0.0),
        (0.1, 10, "symmetric", 1, 0.9),  # the minimum itself
        (0.05, 10, "symmetric", 1, 0.9),  # below it there is no solution
        (0.0, 10, "symmetric", 1, 0.9),
        (0.1, 10, "symmetric", 2, 0.8),
        (0.3, 10, "asymmetric", 1, 0.5),
    ],
)
def test_noise_from_accuracy_by_hand(agreement, classes, kind, top_k, expected):
    assert theory.noise_from_accuracy(agreement, classes, kind, top_k) == pytest.approx(expected, abs=5e-4)


@given(st.floats(0.0, 1.0), class_counts)
def test_symmetric_estimate_inverts_equation_4(share, classes):
    ratio = share * (classes - 1) / classes  # the smaller root: up to the minimum of the parabola
    agreement = paper_formulas.symmetric_accuracy(ratio, classes)
    # At the minimum the inverse has an infinite slope, so that rounding costs half the digits there.
    assert theory.noise_from_accuracy(agreement, classes) == pytest.approx(ratio, abs=1e-6)


@given(st.floats(0.0, 0.5))
def test_asymmetric_estimate_inverts_equation_5(ratio):
    agreement = paper_formulas.asymmetric_accuracy(ratio)
    assert theory.noise_from_accuracy(agreement, 10, "asymmetric") == pytest.approx(ratio, abs=1e-6)


@given(st.floats(0.0, 1.0), class_counts, st.data())
def test_estimate_falls_as_agreement_rises_and_solves_the_equation(agreement, classes, data):
    top_k = data.draw(st.integers(1, classes - 1))
    m = classes / top_k
    ratio = theory.noise_from_accuracy(agreement, classes, top_k=top_k)
    assert 0.0 <= ratio <= (m - 1) / m
    assert theory.noise_from_accuracy(min(agreement + 0.01, 1.0), classes, top_k=top_k) <= ratio
    reached = (1 - ratio) ** 2 + ratio**2 / (m - 1)
    assert reached == pytest.approx(max(agreement, 1 / m), abs=1e-9)


def test_estimate_keeps_its_digits_near_agreement_1():
    assert theory.noise_from_accuracy(paper_formulas.symmetric_accuracy(1e-9, 10), 10) == pytest.approx(
        1e-9, rel=1e-6
    )


# --- label precision and recall


@given(st.floats(0.001, 1.0), st.floats(0.001, 1.0), st.integers(2, 50), st.sampled_from(("symmetric", "asymmetric")))
def test_no_network_selects_more_wrong_labels_than_one_that_memorises(label_skill, skill, classes, kind):
    """Labels and predictions that are right with any probabilities above chance, and that agree equally often."""
    m = classes if kind == "symmetric" else 2
    label_right, right = ((1 + (m - 1) * each) / m for each in (label_skill, skill))
    agreement = label_right * right + (1 - label_right) * (1 - right) / (m - 1)
    noise = 1 - label_right * right / agreement
    most = theory.most_noise_of_selected(agreement, classes, kind)
    assert noise <= most + 1e-6
    if label_skill == skill:  # the prediction is as noisy as the label
        assert noise == pytest.approx(most, abs=1e-6)


def test_most_noise_of_selected_by_hand():
    """Noise 0.5 and 10 classes: a network that memorises agrees with 0.25 + 0.25/9 of the labels, 0.25 rightly."""
    agreement = 0.25 + 0.25 / 9
    assert theory.most_noise_of_selected(agreement, 10, "symmetric") == pytest.approx(1 - 0.25 / agreement)
    assert theory.most_noise_of_selected(0.52, 10, "asymmetric") == pytest.approx(0.16 / 0.52)
    assert theory.most_noise_of_selected(1.0, 10, "symmetric") == 0.0


def test_precision_and_recall_by_hand():
    matrix, prior = [[0.8, 0.2], [0.5, 0.5]], [0.25, 0.75]
    np.testing.assert_allclose(paper_formulas.label_precision_per_class(matrix), [0.64 / 0.68, 0.5])
    np.testing.assert_allclose(paper_formulas.label_recall_per_class(matrix), [0.8, 0.5])
    # Ratios of sums over the classes; the mean of the classes' ratios would be another number.
    assert theory.label_precision(matrix, prior) == pytest.approx((0.16 + 0.1875) / (0.17 + 0.375))
    assert theory.label_recall(matrix, prior) == pytest.approx((0.16 + 0.1875) / (0.2 + 0.375))


def test_several_rounds_by_hand():
    matrix, prior = theory.symmetric_transition(0.5, 10), np.ones(10)
    assert theory.label_recall_after(matrix, prior, 4) == pytest.approx(0.9375, abs=5e-5)
    assert theory.label_precision_after(matrix, prior, 4) == pytest.approx(0.8210, abs=5e-5)
    assert theory.label_recall_after(matrix, prior, 0) == 0.0


@given(noise_matrices())
def test_more_rounds_recall_more_and_the_first_round_is_proposition_2(matrix):
    prior = np.arange(1, len(matrix) + 1)
    weights = prior / prior.sum()
    recalls = [theory.label_recall_after(matrix, prior, rounds) for rounds in range(6)]
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(recalls))
    chosen = weights @ np.diag(matrix) ** 2
    assert recalls[1] == pytest.approx(chosen / (weights @ np.diag(matrix)))
    expected = chosen / (weights @ (matrix**2).sum(axis=1))
    assert theory.label_precision_after(matrix, prior, 1) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "classes", "kind", "expected", "digits"),
    [
        (0.22567, 50, "symmetric", 0.0017, 5e-5),  # with many classes nothing is forgotten
        (0.22567, 1000, "symmetric", 0.00008, 1e-5),
        (0.22567, 50, "asymmetric", 0.079, 1e-3),
        (0.5, 10, "symmetric", 0.1, 1e-12),
        (0.4, 10, "asymmetric", 0.16 / 0.52, 1e-12),
        (0.0, 10, "symmetric", 0.0, 0.0),
        (1.0, 10, "asymmetric", 1.0, 0.0),
    ],
)
def test_noise_of_selected_by_hand(ratio, classes, kind, expected, digits):
    assert theory.noise_of_selected(ratio, classes, kind) == pytest.approx(expected, abs=digits)


@given(st.floats(1e-6, 1.0), class_counts)
def test_supplement_d_selection_is_cleaner_than_the_data(ratio, classes):
    # Supp. D: T_ii is the largest of its row. The margin keeps the strict inequality out of rounding's reach.
    if ratio / (classes - 1) < (1 - ratio) * (1 - 1e-9):
        assert theory.noise_of_selected(ratio, classes, "symmetric") < ratio
    if ratio < (1 - ratio) * (1 - 1e-9):
        assert theory.noise_of_selected(ratio, classes, "asymmetric") < ratio


@given(noise_matrices())
def test_equation_9_bounds_every_noise_matrix(matrix):
    classes = len(matrix)
    for t_ii, precision in zip(np.diag(matrix), paper_formulas.label_precision_per_class(matrix), strict=True):
        lower, upper = paper_formulas.label_precision_bounds(float(t_ii), classes)
        assert lower - 1e-9 <= precision <= upper + 1e-9


@given(ratios, st.integers(2, 50))
def test_equation_9_is_attained(ratio, classes):
    lower, upper = paper_formulas.label_precision_bounds(1 - ratio, classes)
    symmetric = paper_formulas.label_precision_per_class(theory.symmetric_transition(ratio, classes))
    asymmetric = paper_formulas.label_precision_per_class(theory.asymmetric_transition(ratio, classes))
    np.testing.assert_allclose(symmetric, upper, rtol=1e-9)
    np.testing.assert_allclose(asymmetric, lower, rtol=1e-9)


def test_nothing_to_divide_by_is_nan_without_a_warning():
    swapped, prior = np.array([[0.0, 1.0], [1.0, 0.0]]), [0.5, 0.5]
    assert math.isnan(theory.label_recall(swapped, prior))
    assert math.isnan(theory.label_recall_after(swapped, prior, 3))
    assert theory.label_precision(swapped, prior) == 0.0
    np.testing.assert_array_equal(paper_formulas.label_precision_per_class(swapped), [0.0, 0.0])
    np.testing.assert_array_equal(paper_formulas.label_recall_per_class(swapped), [0.0, 0.0])
    assert math.isnan(theory.label_precision_after(np.eye(2), prior, 0))
    assert paper_formulas.label_precision_bounds(0.0, 5) == (0.0, 0.0)


# --- Monte Carlo: true class from the prior, label and prediction independent draws from T[true class]

SAMPLES = 200_000
NOISE = {
    "symmetric 0.5": (theory.symmetric_transition(0.5, 10), np.ones(10)),
    "symmetric 0.8": (theory.symmetric_transition(0.8, 10), np.ones(10)),
    "pair flip 0.4": (theory.asymmetric_transition(0.4, 10), np.ones(10)),
    "four unequal classes": (
        np.array([[0.9, 0.1, 0.0, 0.0], [0.3, 0.4, 0.2, 0.1], [0.05, 0.15, 0.8, 0.0], [0.2, 0.2, 0.35, 0.25]]),
        np.array([0.5, 0.3, 0.15, 0.05]),
    ),
    "random, six unequal classes": (
        0.5 * np.eye(6) + 0.5 * np.random.default_rng(5).dirichlet(np.full(6, 0.5), size=6),
        np.array([30, 5, 20, 10, 25, 10]),
    ),
}


def draw_labels(rng, matrix, true_class):
    """Labels int [n], row t drawn from T[true_class[t]] by inverting its cumulative distribution."""
    steps = np.cumsum(matrix, axis=1)[:, :-1]
    return (rng.random(len(true_class))[:, None] >= steps[true_class]).sum(axis=1)


def simulate(name, rounds):
    """(matrix, prior, true class, label clean?, selected within k rounds? [rounds, n])."""
    matrix, prior = NOISE[name]
    rng = np.random.default_rng([2019, list(NOISE).index(name)])
    true_class = rng.choice(len(prior), size=SAMPLES, p=prior / prior.sum())
    given_label = draw_labels(rng, matrix, true_class)
    agreed = np.stack([draw_labels(rng, matrix, true_class) == given_label for _ in range(rounds)])
    return matrix, prior, true_class, given_label == true_class, np.logical_or.accumulate(agreed)


def assert_share(hits, expected):
    """The mean of the booleans `hits` is within 3 standard errors of `expected`."""
    error = math.sqrt(expected * (1 - expected) / len(hits))
    assert abs(hits.mean() - expected) <= 3 * error + 1e-12


@pytest.mark.parametrize("name", NOISE)
def test_simulation_of_one_round(name):
    matrix, prior, true_class, clean, selected = simulate(name, rounds=1)
    selected = selected[0]
    assert_share(selected, theory.accuracy(matrix, prior))
    assert_share(clean[selected], theory.label_precision(matrix, prior))
    assert_share(selected[clean], theory.label_recall(matrix, prior))
    for i in range(len(matrix)):
        of_class = true_class == i
        assert_share(selected[of_class], paper_formulas.accuracy_per_class(matrix)[i])
        assert_share(clean[of_class & selected], paper_formulas.label_precision_per_class(matrix)[i])
        assert_share(selected[of_class & clean], paper_formulas.label_recall_per_class(matrix)[i])


@pytest.mark.parametrize("name", NOISE)
def test_simulation_of_four_rounds(name):
    matrix, prior, _, clean, selected_within = simulate(name, rounds=4)
    for rounds, selected in enumerate(selected_within, start=1):
        assert_share(selected[clean], theory.label_recall_after(matrix, prior, rounds))
        assert_share(clean[selected], theory.label_precision_after(matrix, prior, rounds))
