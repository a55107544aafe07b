"""The judge by features: wrong labels are found, duplicates do not give each other away."""

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests.support.thread_world import on_ranks
from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv import feature_judge
from trainer.incv.feature_judge import Examined, JudgedSamples, Verdict, judge_samples

ROWS, CLASSES = 600, 6


@pytest.fixture(scope="module")
def truth() -> np.ndarray:
    return np.random.default_rng(0).integers(CLASSES, size=ROWS)


@pytest.fixture(scope="module")
def features(truth) -> torch.Tensor:
    random = np.random.default_rng(1)
    middles = random.normal(size=(CLASSES, 16))
    return torch.from_numpy(middles[truth] + 0.7 * random.normal(size=(ROWS, 16))).half()


def prepare(features, labels, groups=None, trained=None) -> JudgedSamples:
    groups = np.arange(len(labels)) if groups is None else groups
    near, _ = nearest(features.float() - features.float().mean(dim=0), 20)
    folds = stratified_group_folds(labels, groups, 5, seed=0)
    examined = Examined(np.arange(len(labels)) * 2, features, near.int().numpy(), groups)
    trained = np.ones(len(labels), bool) if trained is None else trained
    return JudgedSamples(examined, labels, folds, trained)


def judge(*given, **more) -> Verdict:
    return judge_samples(prepare(*given, **more), CLASSES, SINGLE_PROCESS)


def flip(truth, share, seed=2):
    random = np.random.default_rng(seed)
    flips = random.random(len(truth)) < share
    return np.where(flips, (truth + random.integers(1, CLASSES, len(truth))) % CLASSES, truth)


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_wrong_labels_have_the_highest_losses(truth, features, share):
    given = flip(truth, share)
    verdict = judge(features, given)
    assert roc_auc_score(given != truth, verdict.predictions.loss) > 0.95
    assert verdict.facts["uniform_flips"] == pytest.approx(share, abs=0.06)
    assert verdict.facts["converged"]


def test_predictions_follow_from_the_probabilities(truth, features):
    verdict = judge(features, flip(truth, 0.2))
    predictions, probabilities = verdict.predictions, verdict.probabilities
    assert np.array_equal(predictions.sample_id, np.arange(ROWS) * 2)
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(probabilities.argmax(axis=1), predictions.predicted)
    assert np.allclose(probabilities.max(axis=1), predictions.predicted_probability, atol=1e-5)


def test_duplicates_do_not_confirm_each_other(truth, features):
    """Ten copies of an image with the same wrong label would outvote all others if they could."""
    given = truth.copy()
    copied = int(np.flatnonzero(truth == 0)[0])
    copies = torch.cat([features, features[copied].repeat(9, 1)])
    labels = np.concatenate([given, np.full(9, 1)])
    labels[copied] = 1
    groups = np.concatenate([np.arange(ROWS), np.full(9, copied)])
    together = judge(copies, labels, groups).predictions
    mine = np.r_[copied, np.arange(ROWS, ROWS + 9)]
    assert (together.predicted[mine] == 0).all()
    apart = judge(copies, labels).predictions  # nobody knows that they are copies
    assert (apart.given_probability[mine] > together.given_probability[mine]).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_judge_few_samples_as_one_process_does(truth, features, ranks):
    samples = prepare(features, flip(truth, 0.3))
    alone = judge_samples(samples, CLASSES, SINGLE_PROCESS)
    for verdict in on_ranks(ranks, lambda world: judge_samples(samples, CLASSES, world)):
        assert np.array_equal(verdict.predictions.loss, alone.predictions.loss)
        assert np.array_equal(verdict.probabilities, alone.probabilities)


def test_ranks_that_hold_different_classes_calibrate_together(truth, features, monkeypatch):
    """As the images of a folder, whose order is that of the classes."""
    monkeypatch.setattr(feature_judge, "_FEW_ROWS", 0)
    order = np.argsort(truth, kind="stable")
    given = np.where(truth[order] < 2, truth[order], flip(truth[order], 0.5))  # wrong labels on the second rank alone
    samples = prepare(features[torch.from_numpy(order)], given)
    alone = judge_samples(samples, CLASSES, SINGLE_PROCESS)
    shared = on_ranks(2, lambda world: judge_samples(samples, CLASSES, world))[0]
    assert shared.facts["temperature"] == pytest.approx(alone.facts["temperature"], rel=0.01)
    assert shared.facts["uniform_flips"] == pytest.approx(alone.facts["uniform_flips"], abs=0.003)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_work_and_agree(truth, features, ranks, monkeypatch):
    monkeypatch.setattr(feature_judge, "_FEW_ROWS", 0)
    samples = prepare(features, flip(truth, 0.3))
    alone = judge_samples(samples, CLASSES, SINGLE_PROCESS)
    every = on_ranks(ranks, lambda world: judge_samples(samples, CLASSES, world))
    for verdict in every:
        assert np.array_equal(verdict.predictions.sample_id, alone.predictions.sample_id)
        assert np.array_equal(verdict.predictions.loss, every[0].predictions.loss)
        assert np.array_equal(verdict.probabilities, every[0].probabilities)
        assert verdict.facts == every[0].facts
        assert verdict.facts["penalty"] == alone.facts["penalty"]
        assert (verdict.predictions.predicted == alone.predictions.predicted).mean() > 0.99
        assert np.allclose(verdict.predictions.loss, alone.predictions.loss, atol=0.05)


def test_held_out_samples_teach_nobody(truth, features):
    given = flip(truth, 0.1)
    held_out = np.arange(ROWS) % 4 == 0
    one = judge(features, given, trained=~held_out).predictions
    changed = np.where(held_out, (given + 1) % CLASSES, given)
    folds_of = stratified_group_folds(given, np.arange(ROWS), 5, seed=0)
    near, _ = nearest(features.float() - features.float().mean(dim=0), 20)
    examined = Examined(np.arange(ROWS) * 2, features, near.int().numpy(), np.arange(ROWS))
    two = judge_samples(JudgedSamples(examined, changed, folds_of, ~held_out), CLASSES, SINGLE_PROCESS).predictions
    assert (one.predicted[~held_out] == two.predicted[~held_out]).mean() > 0.99  # only the calibration may differ
