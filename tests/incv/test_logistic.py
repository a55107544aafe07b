"""The logistic regression against scikit-learn, and what is measured on its held-out predictions."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.feature_judge import uniform_flips
from trainer.incv.logistic import Fit, fit_temperature, scale_rows


def make_clusters(rows: int, classes: int, seed: int, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of overlapping clusters, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (rows,), generator=random)
    middles = torch.randn(classes, width, generator=random)
    return middles[labels] + 0.5 * torch.randn(rows, width, generator=random), labels


@pytest.mark.parametrize("penalty", [0.1, 0.01])
def test_the_minimum_is_that_of_scikit_learn(penalty):
    features, labels = make_clusters(300, 4, seed=0)
    weights = (torch.arange(300) % 3 > 0).float()
    found = Fit(features, labels, 4, SINGLE_PROCESS).train(weights, penalty)
    used = weights.bool()
    oracle = LogisticRegression(C=1 / (penalty * int(used.sum())), tol=1e-8, max_iter=2000)
    oracle.fit(features[used].numpy(), labels[used].numpy())
    assert found.converged
    expected = oracle.predict_proba(features.numpy())
    assert np.abs(found.logits(features).softmax(dim=1).numpy() - expected).max() < 0.02


def test_a_row_is_predicted_without_its_own_label():
    features, labels = make_clusters(120, 3, seed=1)
    folds = torch.arange(120) % 4
    fit = Fit(scale_rows(features, features.mean(dim=0)), labels, 3, SINGLE_PROCESS)
    before = fit.cross_validate(folds, torch.ones(120), 4)
    changed = labels.clone()
    changed[folds == 2] = (labels[folds == 2] + 1) % 3
    after = Fit(fit.features, changed, 3, SINGLE_PROCESS)
    again = [after.train((folds != 2).float(), before.penalty)]
    alone = Fit(fit.features, labels, 3, SINGLE_PROCESS).train((folds != 2).float(), before.penalty)
    assert torch.equal(again[0].weight, alone.weight)


def test_the_penalty_grows_with_the_noise():
    features, labels = make_clusters(400, 4, seed=2, width=64)
    flipped = labels.clone()
    flips = torch.rand(400, generator=torch.Generator().manual_seed(3)) < 0.5
    flipped[flips] = (labels[flips] + torch.randint(1, 4, (int(flips.sum()),))) % 4
    folds = torch.arange(400) % 5
    rows = scale_rows(features, features.mean(dim=0))
    clean = Fit(rows, labels, 4, SINGLE_PROCESS).cross_validate(folds, torch.ones(400), 5)
    noisy = Fit(rows, flipped, 4, SINGLE_PROCESS).cross_validate(folds, torch.ones(400), 5)
    assert noisy.penalty >= clean.penalty
    predicted = noisy.held_out_logits(rows, folds).argmax(dim=1)
    assert (predicted == labels).float().mean() > 0.85


def test_the_temperature_undoes_overconfidence():
    random = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(20_000, 5, generator=random)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=random)[:, 0]
    assert fit_temperature(3 * logits, labels) == pytest.approx(1 / 3, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_random_flips_are_told_from_soft_predictions(share):
    random = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(20_000, 6, generator=random)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=random)[:, 0]
    flips = torch.rand(20_000, generator=random) < share
    labels[flips] = (labels[flips] + torch.randint(1, 6, (int(flips.sum()),), generator=random)) % 6
    assert uniform_flips(2 * logits, labels) == pytest.approx(share, abs=0.02)
