"""Wrong labels from plain arrays: labels, and held-out probabilities or features from any model."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shards.errors import DataError
from trainer.distributed.world import SINGLE_PROCESS
from trainer.examine.duplicates import checksum_groups
from trainer.examine.folds import stratified_group_folds
from trainer.examine.neighbours import nearest
from trainer.incv.confident import SUSPICIOUS, confident_joint
from trainer.incv.feature_judge import FOLDS, NEIGHBOURS, Examined, JudgedSamples, judge_samples, uniform_flips
from trainer.incv.logistic import fit_temperature
from trainer.incv.noise_estimates import combine_estimates
from trainer.incv.suspicion import measure_suspicion, usual_probabilities
from trainer.loading.sample_order import derive_stream

Floats = npt.NDArray[np.float64]
_MOST_TRIED = 50_000
"""Samples that calibration and flips are measured on."""
_SMALLEST = 1e-12
_FEW = 100
"""Samples below which held-out predictions may agree with every label by chance."""
_SUM_TOLERANCE = 1e-2


@dataclass(frozen=True, eq=False)
class LabelIssues:
    """What the probabilities say about the labels; arrays have one entry per sample."""

    is_issue: npt.NDArray[np.bool_]
    """Whether the label is flagged: another class is predicted, and the suspicion is above 1."""
    suspicion: npt.NDArray[np.float32]
    """Logarithm of the odds of the likeliest other class against the given label, each measured by the square of its
    class's mean probability: sort by it."""
    predicted: npt.NDArray[np.int64]
    noise: float
    """Estimated share of wrong labels."""

    def order(self) -> npt.NDArray[np.int64]:
        """Return all samples, most suspicious first."""
        return np.argsort(-self.suspicion, kind="stable")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{i}</td><td>{self.predicted[i]}</td><td>{self.suspicion[i]:.2f}</td></tr>"
            for i in self.order()[:10]
        )
        head = "<tr><th>sample</th><th>predicted</th><th>suspicion</th></tr>"
        return f"<p>{escape(repr(self))}</p><table>{head}{rows}</table>"

    def __repr__(self) -> str:
        return (
            f"{int(self.is_issue.sum()):,} of {len(self.is_issue):,} labels flagged, {self.noise:.1%} estimated wrong"
        )


def find_label_issues(labels: Any, probabilities: Any = None, *, features: Any = None) -> LabelIssues:
    """Find labels that held-out predictions contradict.

    Args:
        labels: the given labels, integers from 0, [samples].
        probabilities: of each class, [samples, classes], from a model that was not trained on the sample, such as by
            cross-validation.
        features: of each sample, [samples, features], from any network. They are judged as `incv.audit` does it, by a
            logistic regression in five folds and a vote of the nearest neighbours. Give these or probabilities.

    Raises:
        DataError: the arrays do not fit each other, are no probabilities, or were not held out.
    """
    if (probabilities is None) == (features is None):
        raise DataError("give either probabilities, or features=")
    if features is not None:
        probabilities = _judge_features(labels, features)
    given, p = _check(labels, probabilities)
    log_p = _calibrate(given, np.log(np.maximum(p, _SMALLEST)))
    suspicion, predicted = _measure(given, log_p), p.argmax(axis=1)
    is_issue = (suspicion > SUSPICIOUS) & (predicted != given)
    return LabelIssues(is_issue, suspicion, predicted, _estimate(given, log_p, is_issue))


def _judge_features(labels: Any, features: Any) -> npt.NDArray[np.float32]:
    """Return held-out probabilities, calibrated: [samples, classes]. Equal rows count as duplicates."""
    given, rows = np.asarray(labels), np.asarray(features)
    if rows.ndim != 2 or given.shape != rows.shape[:1] or not rows.size:
        raise DataError(f"features must have one row per label: [{given.size}, features], not {list(rows.shape)}")
    if not np.issubdtype(given.dtype, np.integer) or given.min() < 0 or given.max() >= len(given):
        raise DataError("labels must be integers from 0, the numbers of the classes")
    if rows.dtype.kind not in "fiu":
        raise DataError(f"features are of the type {rows.dtype}: give numbers, such as float32")
    rows = np.ascontiguousarray(rows if rows.dtype == np.float16 else rows.astype(np.float32))
    if len(bad := np.flatnonzero(~np.isfinite(rows).all(axis=1))):
        raise DataError(f"the features of sample {bad[0]} hold NaN or infinity: leave such samples out")
    if (rows == rows[0]).all():
        raise DataError("the features of all samples are equal, so they say nothing about the labels")
    classes = int(given.max()) + 1
    if classes < 2:
        raise DataError("all labels are of one class: at least two are needed")
    tensor = torch.from_numpy(rows)
    centred = tensor.float() - tensor.mean(dim=0, dtype=torch.float32)
    groups = checksum_groups(np.array([hash(row.tobytes()) for row in rows], np.int64))
    folds = stratified_group_folds(given.astype(np.int64), groups, FOLDS, derive_stream(0, "incv.split"))
    ids = np.arange(len(given))
    examined = Examined(ids, tensor, nearest(centred, NEIGHBOURS)[0].int().numpy(), groups)
    samples = JudgedSamples(examined, given.astype(np.int64), folds, np.ones(len(given), np.bool_))
    found = judge_samples(samples, classes, SINGLE_PROCESS).probabilities
    if found is None:
        raise DataError(f"{len(given):,} samples of {classes:,} classes are too many to keep their probabilities")
    return found


def estimate_noise(labels: Any, probabilities: Any) -> float:
    """Estimate the share of wrong labels from held-out probabilities; see `find_label_issues`."""
    return find_label_issues(labels, probabilities).noise


def _calibrate(given: npt.NDArray[np.int64], log_p: Floats) -> Floats:
    """Return the logarithms of the probabilities to some power, which makes the given labels likeliest."""
    rows = _some(given)
    factor = fit_temperature(torch.from_numpy(log_p[rows]), torch.from_numpy(given[rows]))
    calibrated: Floats = torch.from_numpy(factor * log_p).log_softmax(dim=1).numpy()
    return calibrated


def _measure(given: npt.NDArray[np.int64], log_p: Floats) -> npt.NDArray[np.float32]:
    wide, labels = torch.from_numpy(log_p), torch.from_numpy(given)
    usual = usual_probabilities(wide, labels, SINGLE_PROCESS)
    return measure_suspicion(wide, labels, usual).numpy().astype(np.float32)


def _estimate(given: npt.NDArray[np.int64], log_p: Floats, doubted: npt.NDArray[np.bool_]) -> float:
    """Return ε from calibrated probabilities."""
    rows, at = _some(given), np.arange(len(given))
    flips = uniform_flips(torch.from_numpy(log_p[rows]), torch.from_numpy(given[rows]))
    predicted = log_p.argmax(axis=1).astype(np.int32)
    of_given, of_predicted = (np.exp(log_p[at, which]).astype(np.float32) for which in (given, predicted))
    joint = confident_joint(given, predicted, of_given, of_predicted, log_p.shape[1])
    return combine_estimates(float(1.0 - np.trace(joint)), flips, float(doubted.mean()))


def _some(given: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.arange(0, len(given), -(-len(given) // _MOST_TRIED))


def _check(labels: Any, probabilities: Any) -> tuple[npt.NDArray[np.int64], Floats]:
    given, p = np.asarray(labels), np.asarray(probabilities, dtype=np.float64)
    if p.ndim != 2 or given.shape != p.shape[:1]:
        raise DataError(f"probabilities must have one row per label: [{given.size}, classes], not {list(p.shape)}")
    if p.shape[1] < 2 or not len(given):
        raise DataError(
            f"probabilities have the shape {list(p.shape)}: at least one sample and two classes are needed"
        )
    if not np.issubdtype(given.dtype, np.integer) or given.min() < 0 or given.max() >= p.shape[1]:
        raise DataError(f"labels must be integers from 0 to {p.shape[1] - 1}, the columns of the probabilities")
    return given.astype(np.int64), require_probabilities(given, p)


def require_probabilities(
    given: npt.NDArray[np.integer[Any]], p: Floats, name_of: Callable[[int], str] = lambda row: f"sample {row}"
) -> Floats:
    """Return probabilities scaled to the sum 1; raise DataError if they are none, or were not held out.

    Args:
        given: the given labels, [samples].
        p: float64 [samples, classes].
        name_of: returns the name of a row, for the error.
    """
    if len(bad := np.flatnonzero(~(np.isfinite(p) & (p >= 0)).all(axis=1))):
        raise DataError(
            f"the probabilities of {name_of(int(bad[0]))} are negative, NaN or infinite: leave out samples without a "
            "prediction, and apply a softmax to logits"
        )
    sums = p.sum(axis=1)
    if np.abs(sums - 1).max() > _SUM_TOLERANCE:
        worst = int(np.abs(sums - 1).argmax())
        raise DataError(
            f"the probabilities of {name_of(worst)} sum to {sums[worst]:.3g}, not 1: apply a softmax first"
        )
    p = p / sums[:, None]
    if len(given) >= _FEW and (p.argmax(axis=1) == given).all():
        raise DataError(
            "the probabilities agree with every label (agreement 1.0), so they are not held out: the model was "
            "trained on what it predicts. Predict each sample by a model that has not seen it (cross-validation)"
        )
    return p
