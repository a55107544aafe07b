"""Wrong labels from plain arrays, with cleanlab's published predictions where they are at hand."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

import incv
from shards.errors import DataError

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "cleanlab_cifar10n_aggregate.npz"
CLEANLAB = {
    "resnet18": (0.9773, 0.7468),
    "efficientnet_b1": (0.9755, 0.7363),
    "swin_base_patch4_window7_224": (0.9960, 0.9290),
}
"""By network: the AUROC of the best score and the F1 of the best filter of cleanlab 2.9.0 on these predictions."""


def simulate(rows: int = 2000, classes: int = 5, wrong: float = 0.2, seed: int = 0):
    """Return given labels, true labels and calibrated probabilities of the true label."""
    random = np.random.default_rng(seed)
    logits = 4 * random.normal(size=(rows, classes))
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    true = np.array([random.choice(classes, p=row) for row in p])
    given = np.where(random.random(rows) < wrong, (true + random.integers(1, classes, rows)) % classes, true)
    return given, true, p


def test_wrong_labels_are_found_and_counted():
    given, true, p = simulate()
    found = incv.find_label_issues(given, p)
    assert roc_auc_score(given != true, found.suspicion) > 0.9
    assert found.noise == pytest.approx((given != true).mean(), abs=0.05)
    assert (given != true)[found.order()[:50]].mean() > 0.95
    assert found.is_issue[found.order()[0]]
    assert "labels flagged" in found._repr_html_()


@pytest.mark.parametrize("network", CLEANLAB)
def test_no_worse_than_cleanlab_on_its_published_predictions(network):
    if not PUBLISHED.exists():
        pytest.skip(f"{PUBLISHED} is not there")
    data = np.load(PUBLISHED)
    wrong = data["given"] != data["true"]
    p = data[network].astype(float)
    found = incv.find_label_issues(data["given"], p / p.sum(axis=1, keepdims=True))
    auroc, f1 = CLEANLAB[network]
    assert roc_auc_score(wrong, found.suspicion) >= auroc
    assert f1_score(wrong, found.is_issue) >= f1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, p: (y[:-1], p), "one row per label"),
        (lambda y, p: (y, p[:, :1]), "two classes"),
        (lambda y, p: (y + 5, p), "integers from 0 to 4"),
        (lambda y, p: (y.astype(float), p), "integers"),
        (lambda y, p: (y, p * 2), "sum to 2"),
        (lambda y, p: (y, np.where(p == p.max(), np.nan, p)), "NaN"),
        (lambda y, p: (p.argmax(axis=1), p), "not held out"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(change, message):
    given, _, p = simulate(200)
    with pytest.raises(DataError, match=message):
        incv.find_label_issues(*change(given, p))


def embed(rows: int = 600, classes: int = 4, wrong: float = 0.15):
    """Return given labels, true labels and features that tell the true ones."""
    random = np.random.default_rng(0)
    true = random.integers(classes, size=rows)
    features = random.normal(size=(classes, 12))[true] + 0.6 * random.normal(size=(rows, 12))
    given = np.where(random.random(rows) < wrong, (true + random.integers(1, classes, rows)) % classes, true)
    return given, true, features


def test_features_alone_are_judged():
    given, true, features = embed()
    found = incv.find_label_issues(given, features=features)
    assert roc_auc_score(given != true, found.suspicion) > 0.95
    assert found.noise == pytest.approx((given != true).mean(), abs=0.05)


def test_equal_features_do_not_confirm_each_other():
    given, true, features = embed(wrong=0.0)
    copied = int(np.flatnonzero(true == 0)[0])
    features = np.concatenate([features, np.repeat(features[copied : copied + 1], 9, axis=0)])
    given = np.concatenate([given, np.full(9, 1)])
    given[copied] = 1
    found = incv.find_label_issues(given, features=features)
    assert found.is_issue[[copied, *range(600, 609)]].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y, f: (y[:-1], f), "one row per label"),
        (lambda y, f: (y, np.ones_like(f)), "equal"),
        (lambda y, f: (y, np.where(f == f.max(), np.inf, f)), "NaN or infinity"),
        (lambda y, f: (y * 0, f), "one class"),
        (lambda y, f: (y.astype(float), f), "integers"),
        (lambda y, f: (y, f.astype(str)), "type"),
    ],
)
def test_features_that_cannot_be_used_are_refused(change, message):
    given, _, features = embed(100)
    labels, rows = change(given, features)
    with pytest.raises(DataError, match=message):
        incv.find_label_issues(labels, features=rows)


def test_either_probabilities_or_features_are_needed():
    given, _, p = simulate(200)
    for arguments in ({}, {"probabilities": p, "features": p}):
        with pytest.raises(DataError, match="either"):
            incv.find_label_issues(given, **arguments)


def test_an_unknown_name_is_named():
    with pytest.raises(AttributeError, match="find_label_issues"):
        incv.find_issues  # noqa: B018
