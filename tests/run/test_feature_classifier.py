"""The classifier on features: fitted on the selected samples, and calibrated although labels are wrong."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from trainer.examine.folds import stratified_group_folds
from trainer.incv.feature_judge import Examined
from trainer.incv.logistic import fit_temperature, scale_rows
from trainer.run import feature_classifier
from trainer.run.feature_classifier import Head, fit_head

ROWS, CLASSES = 1_500, 4


def apply(head: Head, features: torch.Tensor) -> torch.Tensor:
    return scale_rows(features.float(), head.mean) @ head.weight + head.bias


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, np.ndarray]:
    random = np.random.default_rng(0)
    truth = random.integers(CLASSES, size=2 * ROWS)
    middles = random.normal(size=(CLASSES, 16))
    return torch.from_numpy(middles[truth] + 1.6 * random.normal(size=(len(truth), 16)) + 3).half(), truth


@pytest.mark.parametrize(("most", "error"), [(20_000, 0.04), (100, 0.08)], ids=["all folds", "one fold"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_it_is_calibrated_to_the_labels_before_random_flips(share, most, error, data, monkeypatch) -> None:
    monkeypatch.setattr(feature_classifier, "_MOST_ROWS_OF_ALL_FOLDS", most)
    features, truth = data
    random = np.random.default_rng(1)
    flips = random.random(ROWS) < share
    given = np.where(flips, (truth[:ROWS] + random.integers(1, CLASSES, ROWS)) % CLASSES, truth[:ROWS])
    groups = np.arange(ROWS)
    examined = Examined(groups, features[:ROWS], np.zeros((ROWS, 1), np.int32), groups)
    folds = stratified_group_folds(given, groups, 5, seed=0)
    head = fit_head(examined, given, ~flips, folds, 1e-3, CLASSES, torch.device("cpu"))
    logits, right = apply(head, features[ROWS:]), torch.from_numpy(truth[ROWS:])
    agreed = float((logits.argmax(1) == right).float().mean())
    stated = float(logits.softmax(1).max(1).values.mean())
    assert agreed > 0.6
    assert stated == pytest.approx(agreed, abs=error)
    assert fit_temperature(logits, right) == pytest.approx(1, abs=10 * error)
    assert F.cross_entropy(logits, right) < np.log(CLASSES)
