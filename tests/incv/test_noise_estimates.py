"""The noise estimates, and every rule that depends on them."""

import json
import warnings
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES, paper_formulas
from tests.support.prediction_rows import rows
from trainer import theory
from trainer.config.schema import IncvConfig
from trainer.incv.confident import confident_joint
from trainer.incv.noise_estimates import (
    NoiseEstimates,
    estimate_noise,
    remove_ratio,
    uses_best_epoch,
)
from trainer.incv.predictions import Predictions, Status
from trainer.methods import coteaching as coteaching_method
from trainer.methods.built_in import CoteachingConfig, CoteachingIncvConfig, warmup_epochs
from trainer.methods.coteaching import forget_rate
from trainer.methods.inputs import NoiseFacts
from trainer.run.recipe import load_recipe


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def incv(**keys: object) -> IncvConfig:
    return IncvConfig(epochs=1, **keys)


def coteaching(epochs: int = 200, **keys: object) -> CoteachingIncvConfig:
    return CoteachingIncvConfig(epochs=epochs, **keys)


def facts(noise: NoiseEstimates, config: IncvConfig) -> NoiseFacts:
    """What a method is told of the estimates."""
    return NoiseFacts(noise.of_rule(config), noise.confident_of_selected, noise.held_out_of_selected)


def noise_of_selected(config: CoteachingIncvConfig, rules: IncvConfig, noise: NoiseEstimates) -> float:
    return coteaching_method.noise_of_selected(config, rules, facts(noise, rules), len(noise.prior))


def estimates(paper: float, classes: int = 10, confident: float = 0.9, curve: float = 0.7) -> NoiseEstimates:
    return NoiseEstimates(paper, confident, curve, 0.05, 0.03, np.full(classes, 1 / classes), np.eye(classes))


def half(fold: int, first_id: int, agreeing: int, count: int, status: object = Status.OK) -> Predictions:
    return rows(np.arange(first_id, first_id + count), np.arange(count) < agreeing, fold=fold, status=status)


def joined(*parts: Predictions) -> Predictions:
    names = Predictions.__dataclass_fields__
    return Predictions(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# --- the paper's estimate


@pytest.mark.parametrize("classes", [2, 10, 50])
@pytest.mark.parametrize("agreement", [0.52, 0.6, 0.8, 0.99, 1.0])
def test_the_paper_inverts_equation_4_on_fold_0_alone(classes, agreement):
    count = 1000
    first = half(0, 0, round(agreement * count), count)
    found = []
    for agreeing_of_fold_1 in (0, 333, count):
        predictions = joined(first, half(1, count, agreeing_of_fold_1, count))
        given = np.zeros(2 * count, np.int64)
        found.append(estimate_noise(predictions, given, classes, incv()).paper)
    assert found[0] == found[1] == found[2]
    ratio = found[0]
    assert (1 - ratio) ** 2 + ratio**2 / (classes - 1) == pytest.approx(agreement, abs=1e-12)
    assert 0 <= ratio <= (classes - 1) / classes  # the smaller of the two solutions
    if ratio:  # the released code's grid: the smallest of 0, 0.001, ... whose agreement is no longer above
        grid = next(
            step / 1000
            for step in range(1001)
            if paper_formulas.symmetric_accuracy(step / 1000, classes) <= agreement
        )
        assert grid - 0.001 - 1e-9 <= ratio <= grid + 1e-9


def test_of_more_than_two_folds_the_paper_inverts_the_agreement_of_all():
    folds = joined(*(half(fold, 100 * fold, agreeing, 100) for fold, agreeing in enumerate((30, 60, 90))))
    whole = half(0, 0, 180, 300)
    given = np.zeros(300, np.int64)
    found = estimate_noise(folds, given, 10, incv(folds=3)).paper
    assert found == estimate_noise(whole, given, 10, incv()).paper


def test_the_paper_reads_symmetric_noise_for_the_asymmetric_kind_too():
    """As the released code does: only the noise of the selected differs."""
    predictions, given = joined(half(0, 0, 60, 100), half(1, 100, 50, 100)), np.zeros(200, np.int64)
    symmetric = estimate_noise(predictions, given, 10, incv(noise_kind="symmetric"))
    asymmetric = estimate_noise(predictions, given, 10, incv(noise_kind="asymmetric"))
    assert asymmetric.paper == symmetric.paper


@pytest.mark.parametrize(
    ("agreeing", "classes", "expected"), [(9, 10, 0.9), (0, 10, 0.9), (49, 2, 0.5), (1, 50, 0.98)]
)
def test_agreement_below_chance_gives_the_noise_of_chance(agreeing, classes, expected):
    predictions = joined(half(0, 0, agreeing, 100), half(1, 100, 90, 100))
    assert estimate_noise(predictions, np.zeros(200, np.int64), classes, incv()).paper == pytest.approx(expected)


def test_unusable_rows_do_not_count_in_the_agreement():
    usable = joined(half(0, 0, 60, 100), half(1, 100, 60, 100))
    with_unusable = joined(usable, half(0, 200, 0, 70, Status.UNREADABLE), half(0, 270, 0, 30, Status.NON_FINITE))
    expected = estimate_noise(usable, np.zeros(200, np.int64), 10, incv())
    found = estimate_noise(with_unusable, np.zeros(300, np.int64), 10, incv())
    assert found.paper == expected.paper
    assert found.confident == expected.confident


def test_agreement_among_the_top_k_is_read_with_c_over_k():
    predictions = joined(half(0, 0, 700, 1000), half(1, 1000, 0, 10))
    ratio = estimate_noise(predictions, np.zeros(1010, np.int64), 10, incv(agree_top_k=2)).paper
    assert (1 - ratio) ** 2 + ratio**2 / (10 / 2 - 1) == pytest.approx(0.7)


# --- the confident estimate


def slow_joint(given, predicted, given_probability, predicted_probability, classes) -> list[list[Fraction]]:
    """Northcutt et al. 2021, equations 1 to 3, for predictions that count for their likeliest class; exact."""
    count = len(given)
    threshold: dict[int, Fraction] = {}
    for label in range(classes):
        sureness = [Fraction(float(given_probability[row])) for row in range(count) if given[row] == label]
        if sureness:
            threshold[label] = sum(sureness, Fraction()) / len(sureness)
    counts = [[Fraction() for _ in range(classes)] for _ in range(classes)]
    for row in range(count):
        guess = int(predicted[row])
        if guess in threshold and Fraction(float(predicted_probability[row])) >= threshold[guess]:
            counts[given[row]][guess] += 1
    for label in range(classes):
        held = sum(1 for row in range(count) if given[row] == label)
        if not sum(counts[label]):
            counts[label][label] = Fraction(1)
        scale = Fraction(held, count) / sum(counts[label])
        counts[label] = [scale * cell for cell in counts[label]]
    return counts


@settings(max_examples=60, deadline=None)
@drawn(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 60))
def test_the_joint_is_that_of_a_slow_reference(seed, classes, count):
    rng = np.random.default_rng(seed)
    given = rng.integers(0, classes, count)
    predicted = np.where(rng.random(count) < 0.5, given, rng.integers(0, classes, count)).astype(np.int32)
    sixteenths = rng.integers(0, 17, (2, count)) / np.float32(16)  # so that sums are exact and thresholds are met
    found = confident_joint(given, predicted, *sixteenths, classes)
    np.testing.assert_allclose(found, np.array(slow_joint(given, predicted, *sixteenths, classes), float), atol=1e-12)


@settings(max_examples=30, deadline=None)
@drawn(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 200))
def test_rows_of_the_joint_are_the_shares_of_the_given_labels(seed, classes, count):
    rng = np.random.default_rng(seed)
    given = rng.integers(0, classes, count)
    predicted = rng.integers(0, classes, count).astype(np.int32)
    found = confident_joint(given, predicted, rng.random(count), rng.random(count), classes)
    np.testing.assert_allclose(found.sum(axis=1), np.bincount(given, minlength=classes) / count, atol=1e-12)
    assert (found >= 0).all()


def test_the_joint_by_hand():
    """Class 0 is believed from 0.6 on, class 1 from 0.5 on: the third and fourth rows do not count."""
    given = np.array([0, 0, 0, 1, 1, 1])
    predicted = np.array([0, 1, 0, 0, 1, 1], np.int32)
    given_probability = np.array([0.9, 0.4, 0.5, 0.45, 0.5, 0.55], np.float32)
    predicted_probability = np.array([0.9, 0.6, 0.5, 0.55, 0.5, 0.55], np.float32)
    found = confident_joint(given, predicted, given_probability, predicted_probability, 2)
    np.testing.assert_allclose(found, [[0.25, 0.25], [0.0, 0.5]])


def confident_classifier(
    transition: np.ndarray, per_class: int = 2000, accuracy: float = 0.97
) -> tuple[Predictions, np.ndarray]:
    """A network that generalises: it predicts the truth, and is less sure where it is wrong."""
    rng, classes = np.random.default_rng(11), len(transition)
    true = np.repeat(np.arange(classes), per_class)
    given = (rng.random(len(true))[:, None] >= np.cumsum(transition, axis=1)[true][:, :-1]).sum(axis=1)
    right = rng.random(len(true)) < accuracy
    predicted = np.where(right, true, (true + rng.integers(1, classes, len(true))) % classes)
    sure = np.where(right, rng.uniform(0.85, 1.0, len(true)), rng.uniform(0.3, 0.9, len(true)))
    given_probability = np.where(predicted == given, sure, (1 - sure) / (classes - 1))
    predictions = rows(
        np.arange(len(true)),
        predicted == given,
        -np.log(given_probability),
        fold=rng.integers(0, 2, len(true)),
        predicted=predicted,
        given_probability=given_probability,
        predicted_probability=sure,
    )
    return predictions, given


@pytest.mark.parametrize(
    ("transition", "ratio"),
    [(theory.symmetric_transition(ratio, 10), ratio) for ratio in (0.0, 0.2, 0.4, 0.6)]
    + [(theory.asymmetric_transition(0.3, 10), 0.3)],
    ids=["symmetric 0.0", "symmetric 0.2", "symmetric 0.4", "symmetric 0.6", "pair flip 0.3"],
)
def test_a_confident_classifier_gives_the_noise_away(transition, ratio):
    predictions, given = confident_classifier(transition)
    found = estimate_noise(predictions, given, 10, incv())
    assert found.confident == pytest.approx(ratio, abs=0.03)
    np.testing.assert_allclose(found.transition, transition, atol=0.05)
    np.testing.assert_allclose(found.prior, 0.1, atol=0.01)
    theory.check_transition(found.transition)
    if ratio >= 0.3:  # the paper's estimate supposes memorisation: it is low for a network that generalises
        assert found.paper < ratio - 0.1


def test_classes_of_unequal_size_are_told_apart():
    rng = np.random.default_rng(3)
    true = np.repeat([0, 1, 2], [6000, 3000, 1000])
    transition = np.array([[0.7, 0.3, 0.0], [0.0, 0.9, 0.1], [0.2, 0.0, 0.8]])
    given = (rng.random(len(true))[:, None] >= np.cumsum(transition, axis=1)[true][:, :-1]).sum(axis=1)
    sure = rng.uniform(0.9, 1.0, len(true))
    probability = np.where(true == given, sure, 0.5 * (1 - sure))
    predictions = rows(
        np.arange(len(true)),
        true == given,
        fold=rng.integers(0, 2, len(true)),
        predicted=true,
        given_probability=probability,
        predicted_probability=sure,
    )
    found = estimate_noise(predictions, given, 3, incv())
    np.testing.assert_allclose(found.transition, transition, atol=0.02)
    np.testing.assert_allclose(found.prior, [0.6, 0.3, 0.1], atol=0.01)
    assert found.confident == pytest.approx(0.6 * 0.3 + 0.3 * 0.1 + 0.1 * 0.2, abs=0.01)


@pytest.mark.parametrize(
    ("given", "predicted"),
    [
        ([0, 0, 1, 1], [0, 1, 1, 1]),  # classes 2 and 3 are nowhere
        ([0, 0, 1, 1], [3, 3, 3, 3]),  # predicted only as a class that nobody was given
        ([3, 3, 3, 3], [3, 3, 3, 3]),
        ([0], [2]),
    ],
)
def test_empty_classes_leave_no_nan(given, predicted):
    count = len(given)
    predictions = rows(
        np.arange(count),
        np.equal(given, predicted),
        predicted=predicted,
        given_probability=0.2,
        predicted_probability=0.7,
    )
    found = estimate_noise(predictions, np.array(given), 4, incv())
    theory.check_transition(found.transition)
    assert found.prior.sum() == pytest.approx(1.0)
    assert 0.0 <= found.confident <= 1.0
    for rule in ("formula_symmetric", "formula_asymmetric", "confident", "held_out"):
        assert 0.0 <= noise_of_selected(coteaching(noise_of_selected=rule), incv(), found) <= 1.0


def test_estimates_come_back_from_json():
    predictions, given = confident_classifier(theory.symmetric_transition(0.4, 10), per_class=50)
    written = estimate_noise(predictions, given, 10, incv())
    back = NoiseEstimates.from_json(json.loads(json.dumps(written.as_json(), allow_nan=False)))
    assert (back.paper, back.confident) == (written.paper, written.confident)
    np.testing.assert_array_equal(back.transition, written.transition)
    np.testing.assert_array_equal(back.prior, written.prior)
    assert back.confident_of_selected == written.confident_of_selected
    assert back.held_out_of_selected == written.held_out_of_selected


def test_the_recipe_chooses_the_estimate():
    found = estimates(0.2, confident=0.4)
    assert found.of_rule(incv(noise_estimate="paper")) == 0.2
    assert found.of_rule(incv(noise_estimate="confident")) == 0.4


# --- what follows from the noise


@pytest.mark.parametrize(
    ("noise", "expected"), [(0.0, 0.0), (0.2, 0.25), (0.5, 1.0), (2 / 3, 2.0), (0.8, 2.0), (0.9, 2.0), (1.0, 2.0)]
)
def test_removed_for_each_selected(noise, expected):
    assert remove_ratio(incv(), noise) == pytest.approx(expected)
    assert remove_ratio(incv(noise_kind="asymmetric"), noise) == 0.0


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("number", [0.0, 0.1, 3.5])
def test_a_number_for_the_remove_ratio_is_taken_as_given(kind, number):
    assert remove_ratio(incv(remove_ratio=number, noise_kind=kind), 0.8) == number


@pytest.mark.parametrize(
    ("kind", "noise", "rounds_by_best"),
    [
        ("asymmetric", 0.1, 1),
        ("asymmetric", 0.9, 1),
        ("symmetric", 0.61, 1),
        ("symmetric", 0.6, 2),
        ("symmetric", 0.31, 2),
        ("symmetric", 0.3, 4),
        ("symmetric", 0.0, 4),
    ],
)
def test_the_released_rule_changes_from_the_best_epoch_to_the_last(kind, noise, rounds_by_best):
    config = incv(round_network="released_rule", noise_kind=kind)
    by_best = [uses_best_epoch(config, number, noise) for number in range(6)]
    assert by_best == [number < rounds_by_best for number in range(6)]
    assert uses_best_epoch(config, 0, None)  # the first round knows no noise, and every rule says best


@pytest.mark.parametrize(("rule", "expected"), [("best", True), ("last", False)])
def test_best_and_last_hold_for_every_round(rule, expected):
    for kind in ("symmetric", "asymmetric"):
        for number, noise in [(0, None), (0, 0.9), (1, 0.1), (5, 0.1), (5, 0.9)]:
            assert uses_best_epoch(incv(round_network=rule, noise_kind=kind), number, noise) is expected


@pytest.mark.parametrize(
    ("kind", "noise", "epochs", "expected"),
    [
        ("symmetric", 0.2, 200, 40),
        ("symmetric", 0.6, 200, 40),
        ("symmetric", 0.61, 200, 80),
        ("asymmetric", 0.1, 200, 80),
        ("symmetric", 0.2, 5, 1),
        ("asymmetric", 0.2, 5, 2),
        ("symmetric", 0.2, 120, 24),
    ],
)
def test_warm_up_follows_the_noise(kind, noise, epochs, expected):
    assert warmup_epochs(coteaching(epochs), incv(noise_kind=kind), noise) == expected


def test_a_number_of_warm_up_epochs_is_taken_as_given():
    for number in (0, 20, 500):
        assert warmup_epochs(coteaching(warmup_epochs=number), incv(noise_kind="asymmetric"), 0.9) == number


def test_noise_of_the_selected_by_hand():
    """Agreement 0.6 and 50 classes give ε 0.226, ε_S 0.0017 with k = c - 1 and 0.079 with k = 1."""
    found = estimates(theory.noise_from_accuracy(0.6, 50), classes=50)
    assert found.paper == pytest.approx(0.226, abs=5e-4)
    by_symmetric = noise_of_selected(coteaching(noise_of_selected="formula_symmetric"), incv(), found)
    by_asymmetric = noise_of_selected(coteaching(noise_of_selected="formula_asymmetric"), incv(), found)
    assert by_symmetric == pytest.approx(0.0017, abs=5e-5)
    assert by_asymmetric == pytest.approx(0.079, abs=5e-4)
    assert noise_of_selected(coteaching(), incv(), estimates(0.5)) == pytest.approx(1 / 10)  # 0.25/(0.25 + 9 * 0.25)
    assert noise_of_selected(coteaching(noise_of_selected=0.07), incv(), found) == 0.07
    assert noise_of_selected(coteaching(noise_of_selected=0.0), incv(), found) == 0.0


def test_formulas_for_the_selected_read_the_chosen_estimate():
    found = estimates(0.5, confident=0.2)
    chosen = noise_of_selected(coteaching(), incv(noise_estimate="confident"), found)
    assert chosen == pytest.approx(0.04 / (0.04 + 9 * 0.64))


def test_noise_of_the_selected_by_the_estimated_transition():
    """1 - LP of Prop. 2: Σ π T_ii² = 0.8·0.81 + 0.2·0.25, over Σ π Σ T_ij² = 0.8·0.82 + 0.2·0.5."""
    true = np.repeat([0, 1], [800, 200])
    given = np.concatenate([np.repeat([0, 1], [720, 80]), np.repeat([0, 1], [100, 100])])
    right = (given == true).astype(np.float32)
    ones, every = np.ones(1000, np.float32), np.arange(1000)
    sure_of_the_truth = Predictions(
        every,
        (every % 2).astype(np.int8),
        true.astype(np.int32),
        given == true,
        ones,
        right,
        ones,
        (1 - true).astype(np.int32),
        0 * ones,
        (given != true).astype(np.int32),
        np.zeros(1000, np.int8),
    )
    found = estimate_noise(sure_of_the_truth, given, 2, incv())
    np.testing.assert_allclose(found.transition, [[0.9, 0.1], [0.5, 0.5]])
    expected = 1 - (0.8 * 0.81 + 0.2 * 0.25) / (0.8 * 0.82 + 0.2 * 0.5)
    assert noise_of_selected(coteaching(noise_of_selected="confident"), incv(), found) == pytest.approx(expected)


def test_the_formula_follows_the_assumed_kind_of_noise():
    found = estimates(0.4)
    for kind in ("symmetric", "asymmetric"):
        named = noise_of_selected(coteaching(noise_of_selected=f"formula_{kind}"), incv(), found)
        assert noise_of_selected(coteaching(noise_of_selected="formula"), incv(noise_kind=kind), found) == named


def test_forget_rate_of_coteaching_alone():
    recipe = load_recipe(RECIPES / "tiny.yaml", ["labels.ratio=0.25"])
    found = estimates(0.2, confident=0.4)

    def rate(rule: object, noise: NoiseFacts | None = None) -> float:
        inputs: Any = SimpleNamespace(recipe=recipe, incv=SimpleNamespace(noise=noise))
        return forget_rate(CoteachingConfig(epochs=5, forget_rate=rule), inputs)

    assert (rate(0.3), rate(0.0), rate("true_ratio")) == (0.3, 0.0, 0.25)
    assert rate("estimate", facts(found, incv())) == 0.2
    assert rate("estimate", facts(found, incv(noise_estimate="confident"))) == 0.4


def test_each_estimate_can_be_the_one_of_the_rules():
    found = estimates(0.5, confident=0.2, curve=0.3)
    chosen = [found.of_rule(incv(noise_estimate=name)) for name in ("paper", "confident", "confidence_curve")]
    assert chosen == [0.5, 0.2, 0.3]


def test_the_measured_noise_of_the_selected_samples():
    found, rule = estimates(0.5), coteaching(noise_of_selected="held_out")
    assert noise_of_selected(rule, incv(), found) == found.held_out_of_selected


def test_the_measured_noise_holds_for_the_likeliest_class_alone():
    keys = ("methods=[coteaching_incv]", "coteaching_incv.noise_of_selected=held_out")
    load_recipe(RECIPES / "tiny.yaml", keys)
    with pytest.raises(ConfigError, match="agree_top_k"):
        load_recipe(RECIPES / "tiny.yaml", [*keys, "incv.agree_top_k=2"])
