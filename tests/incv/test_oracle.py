"""Algorithms 1 and 2 with an oracle as network: selections must match the theory's precision and recall.

The oracle is the paper's memorising network (Claim 1): each round it predicts a held-out sample afresh from T[true].
Everything else is the code that runs: corruption, folds, merging, selection, measuring.
"""

import math

import numpy as np
import pytest

from tests.support import paper_formulas
from tests.support.prediction_rows import rows
from trainer import theory
from trainer.config.schema import IncvConfig
from trainer.incv import measure
from trainer.incv.folds import split_parts
from trainer.incv.noise_estimates import estimate_noise
from trainer.incv.predictions import Predictions, merge_predictions
from trainer.incv.selection import apply_round
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.sample_order import derive_stream
from trainer.run.labels import corrupt_labels

ROUNDS = 4
OUTSIDE = 500  # ids below this are in no run: sample_id and row must not be confused
GENERAL = np.array(
    [
        [0.55, 0.25, 0.15, 0.05, 0.00],
        [0.10, 0.80, 0.00, 0.05, 0.05],
        [0.00, 0.30, 0.40, 0.00, 0.30],
        [0.05, 0.05, 0.20, 0.65, 0.05],
        [0.00, 0.00, 0.05, 0.00, 0.95],
    ]
)
CASES = {
    "symmetric": (theory.symmetric_transition(0.5, 10), [4000] * 10),
    "asymmetric": (theory.asymmetric_transition(0.4, 10), [4000] * 10),
    "general": (GENERAL, [16000, 12000, 6000, 4000, 2000]),
}


class Oracle:
    """A run of Algorithm 2 (r = 0) in which T itself predicts."""

    def __init__(self, transition: np.ndarray, counts: list[int], seed: int = 0) -> None:
        self.transition, self.counts, self.classes = transition, np.array(counts), len(counts)
        self._rng, self._seed = np.random.default_rng(seed), seed
        self.ids = np.arange(OUTSIDE, OUTSIDE + sum(counts), dtype=np.int64)
        self.true = self._rng.permutation(np.repeat(np.arange(self.classes), counts))
        self.given = corrupt_labels(self.true, self.ids, transition, derive_stream(seed, "labels"))

    def rounds(self, count: int, folds: int = 2) -> list[tuple[SelectionIndex, Predictions]]:
        index = SelectionIndex.of_candidates(OUTSIDE + len(self.ids), self.ids)
        results = []
        for number in range(count):
            candidates = index.ids(State.CANDIDATE)
            parts = split_parts(derive_stream(self._seed, "incv.split", number), candidates, folds)
            predictions = merge_predictions([self._judge(part, fold) for fold, part in enumerate(parts)], candidates)
            index = apply_round(index, predictions, number, remove_ratio=0.0)
            results.append((index, predictions))
        return results

    def _judge(self, held_out: np.ndarray, fold: int) -> Predictions:
        true, given = self.true[held_out - OUTSIDE], self.given[held_out - OUTSIDE]
        draws = self._rng.random(len(held_out))
        predicted = (draws[:, None] >= np.cumsum(self.transition, axis=1)[true][:, :-1]).sum(axis=1)
        right = predicted == given
        sure = self._rng.uniform(0.7, 1.0, len(held_out))
        return rows(
            held_out,
            right,
            -np.log(np.where(right, sure, 0.01)),
            fold=fold,
            predicted=predicted,
            given_probability=np.where(right, sure, 0.01),
            predicted_probability=sure,
        )

    def selected(self, index: SelectionIndex) -> np.ndarray:
        return (index.state == State.SELECTED)[self.ids]


@pytest.fixture(scope="module", params=CASES)
def run(request) -> tuple[Oracle, list[tuple[SelectionIndex, Predictions]]]:
    oracle = Oracle(*CASES[request.param])
    return oracle, oracle.rounds(ROUNDS)


def standard_error(share: float, count: int) -> float:
    return math.sqrt(share * (1 - share) / count)


def test_algorithm_1_gives_proposition_2_for_every_class(run):
    oracle, results = run
    selected = oracle.selected(results[0][0])
    true, given, classes = oracle.true, oracle.given, oracle.classes
    measured = measure.label_precision_by_class(true, given, selected, classes)
    for label, expected in enumerate(paper_formulas.label_precision_per_class(oracle.transition)):
        count = np.count_nonzero(selected & (true == label))
        assert abs(measured[label] - expected) <= 4 * standard_error(expected, count), f"LP of class {label}"
    measured = measure.label_recall_by_class(true, given, selected, classes)
    for label, expected in enumerate(paper_formulas.label_recall_per_class(oracle.transition)):
        count = np.count_nonzero((true == label) & (given == label))
        assert abs(measured[label] - expected) <= 4 * standard_error(expected, count), f"LR of class {label}"


@pytest.mark.parametrize("k", range(1, ROUNDS + 1))
def test_algorithm_2_gives_the_precision_and_recall_of_k_rounds(run, k):
    oracle, results = run
    selected = oracle.selected(results[k - 1][0])
    expected = theory.label_precision_after(oracle.transition, oracle.counts, k)
    measured = measure.label_precision(oracle.true, oracle.given, selected)
    assert abs(measured - expected) <= 3 * standard_error(expected, np.count_nonzero(selected))
    expected = theory.label_recall_after(oracle.transition, oracle.counts, k)
    measured = measure.label_recall(oracle.true, oracle.given, selected)
    assert abs(measured - expected) <= 3 * standard_error(expected, np.count_nonzero(oracle.true == oracle.given))


@pytest.mark.parametrize("folds", [2, 5])
@pytest.mark.parametrize(
    ("case", "precision", "recall"),
    [
        ("symmetric", 0.8210, 0.9375),
        ("asymmetric", 0.6 * (1 - 0.4**4) / (0.6 * (1 - 0.4**4) + 0.4 * (1 - 0.6**4)), 1 - 0.4**4),
    ],
)
def test_four_rounds_by_hand(case, precision, recall, folds):
    """The same comparison without our formulas: symmetric noise 0.5 and pair flip 0.4 worked out by hand."""
    oracle = Oracle(*CASES[case], seed=1)
    selected = oracle.selected(oracle.rounds(4, folds)[-1][0])
    assert measure.label_precision(oracle.true, oracle.given, selected) == pytest.approx(precision, abs=0.007)
    assert measure.label_recall(oracle.true, oracle.given, selected) == pytest.approx(recall, abs=0.007)


def test_nothing_is_removed_and_every_sample_is_selected_or_still_candidate(run):
    oracle, results = run
    index = results[-1][0]
    counts = np.bincount(index.state, minlength=len(State))
    assert counts[State.OUTSIDE] == OUTSIDE
    assert counts[State.SELECTED] + counts[State.CANDIDATE] == len(oracle.ids)


def test_agreement_of_round_1_is_that_of_proposition_1(run):
    oracle, results = run
    expected = theory.accuracy(oracle.transition, oracle.counts)
    for fold in (0, 1):
        half = results[0][1].of_fold(fold)
        assert abs(half.agreement() - expected) <= 4 * standard_error(expected, len(half.sample_id))


def test_the_papers_estimate_reads_symmetric_noise_off_a_memorising_network():
    for ratio in (0.2, 0.5):
        oracle = Oracle(theory.symmetric_transition(ratio, 10), [4000] * 10)
        predictions = oracle.rounds(1)[0][1]
        noise = estimate_noise(predictions, oracle.given[predictions.sample_id - OUTSIDE], 10, IncvConfig(epochs=1))
        assert noise.paper == pytest.approx(ratio, abs=0.02)
