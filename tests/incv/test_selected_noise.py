"""The noise of the samples that agree with a held-out prediction, against simulated networks and by hand."""

import numpy as np
import pytest
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st

from tests.support.simulated_predictions import CLASSES, pair_flip, simulated, symmetric
from trainer import theory
from trainer.config.schema import IncvConfig
from trainer.incv.confidence_curve import estimate_from_confidence
from trainer.incv.noise_estimates import estimate_noise, noise_of_agreeing

NOISY = pytest.mark.parametrize(
    "transition",
    [symmetric(0.2), symmetric(0.5), pair_flip(0.4), 0.5 * symmetric(0.4) + 0.5 * pair_flip(0.3)],
    ids=("sym 0.2", "sym 0.5", "pair 0.4", "both kinds"),
)


@NOISY
@pytest.mark.parametrize("sharpness", [2.0, 4.0, 8.0], ids=("a poor network", "a fair network", "a good network"))
def test_it_is_the_noise_of_the_selected_samples(transition: np.ndarray, sharpness: float):
    predictions, given, true = simulated(transition, sharpness, 50_000, seed=5)
    wrong = (given != true)[predictions.agrees].mean()
    assert noise_of_agreeing(given, predictions.predicted, transition) == pytest.approx(wrong, abs=0.02)


@NOISY
@pytest.mark.parametrize("sharpness", [4.0, 8.0], ids=("a fair network", "a good network"))
def test_the_estimated_transition_matrix_is_good_enough(transition: np.ndarray, sharpness: float):
    predictions, given, true = simulated(transition, sharpness, 50_000, seed=6)
    wrong = (given != true)[predictions.agrees].mean()
    estimated = estimate_from_confidence(predictions, given, CLASSES).transition
    assert noise_of_agreeing(given, predictions.predicted, estimated) == pytest.approx(wrong, abs=0.02)


def test_the_formula_of_the_paper_is_too_high_for_a_network_that_generalises():
    predictions, given, true = simulated(pair_flip(0.4), 8.0, 50_000, seed=7)
    wrong = (given != true)[predictions.agrees].mean()
    assert noise_of_agreeing(given, predictions.predicted, pair_flip(0.4)) == pytest.approx(wrong, abs=0.02)
    assert theory.noise_of_selected(0.4, CLASSES, "asymmetric") > wrong + 0.1


@pytest.mark.parametrize("transition", [symmetric(0.3), pair_flip(0.3)], ids=("symmetric", "pair flip"))
def test_for_a_network_that_memorises_it_is_the_formula_of_the_paper(transition: np.ndarray):
    """Predictions drawn from T, as Claim 1 has them."""
    draws = np.random.default_rng(8)
    true = draws.integers(CLASSES, size=200_000)
    given, predicted = (np.array([draws.choice(CLASSES, p=row) for row in transition[true]]) for _ in range(2))
    expected = 1.0 - theory.label_precision(transition, np.ones(CLASSES))
    assert noise_of_agreeing(given, predicted, transition) == pytest.approx(expected, abs=0.01)


def test_two_classes_by_hand():
    """60 images of class 0, 40 of class 1; T has rows (0.8, 0.2) and (0, 1); 50 and 30 are predicted right.

    Of class 0, 40 are labelled and predicted 0, 10 labelled 1 and predicted 0, 8 labelled 0 and predicted 1, and 2
    both 1; of class 1, 30 are both 1, and 10 labelled 1 and predicted 0. 72 agree, 2 of them wrongly labelled.
    """
    given = np.repeat([0, 1, 0, 1], [40, 10 + 10, 8, 2 + 30])
    predicted = np.repeat([0, 0, 1, 1], [40, 10 + 10, 8, 2 + 30])
    assert noise_of_agreeing(given, predicted, np.array([[0.8, 0.2], [0.0, 1.0]])) == pytest.approx(2 / 72)


@settings(max_examples=50, deadline=None)
@forall(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2**31))
def test_any_counts_give_a_share(classes: int, count: int, seed: int):
    draws = np.random.default_rng(seed)
    given, predicted = draws.integers(classes, size=(2, count))
    for transition in (
        np.eye(classes),
        np.full((classes, classes), 1 / classes),
        draws.dirichlet(np.ones(classes), classes),
    ):
        found = noise_of_agreeing(given, predicted, transition)
        assert found is None or 0.0 <= found <= 1.0


@pytest.mark.parametrize("assumed", [0.88, 0.89, 0.91, 0.92])
def test_a_transition_matrix_that_contradicts_the_predictions_gives_no_share(assumed: float):
    """At a noise of 0.9 the labels of 10 classes tell nothing; near it, a small error of T becomes a large one."""
    predictions, given, _ = simulated(symmetric(0.8), 2.0, 50_000, seed=9)
    assert noise_of_agreeing(given, predictions.predicted, symmetric(assumed)) is None


@settings(max_examples=20, deadline=None)
@forall(st.floats(0.0, 0.9), st.floats(0.5, 8.0), st.integers(0, 2**31))
def test_the_estimate_is_at_most_that_of_a_network_that_memorises(ratio: float, sharpness: float, seed: int):
    """Whatever the estimate of T, Co-teaching never discards more than the agreement can explain."""
    predictions, given, _ = simulated(symmetric(ratio), sharpness, 2_000, seed)
    found = estimate_noise(predictions, given, CLASSES, IncvConfig(epochs=1)).held_out_of_selected
    assert found is not None
    assert 0.0 <= found <= theory.most_noise_of_selected(predictions.agreement(), CLASSES, "symmetric")
