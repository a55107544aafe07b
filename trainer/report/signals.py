"""Measures what a run shows of its own quality, from its files, for `trust`."""

from collections.abc import Iterable
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.incv.confident import are_confident
from trainer.incv.selection_index import SelectionIndex, State
from trainer.passes import Status
from trainer.report.metrics_file import read_metrics
from trainer.report.run import ReportRun, RunSamples
from trainer.report.summary import first_set, gain, method_with
from trainer.report.trust import Signals

RoundPredictions = tuple[NDArray[np.int64], NDArray[np.int32]]
"""The usable predictions of a round: sample_ids, and the predicted class of each."""
Repeated = NDArray[np.int8]
"""Whether the rounds repeat a contradiction, by sample_id; see `repeated_predictions`."""
LISTED = 24
"""How many of the most suspicious samples are checked for repeated suggestions."""
_FEW_REPEATED = 10
"""With fewer samples that were predicted twice, the share of repeated predictions says nothing."""
_RARE_SHARE, _RARE_COUNT = 1 / 3, 5


def measure_signals(run: ReportRun, report: dict[str, Any]) -> Signals | None:
    """Return the signals of a run whose INCV has finished; None for other runs. report: the report so far."""
    incv, selection, samples = run.incv, run.selection, run.samples
    if incv is None or selection is None or not incv.get("rounds") or not samples.inside.any():
        return None
    first, noise = incv["rounds"][0], report["noise"]
    repeated = read_repeated(run, samples)
    given = samples.given[samples.inside]
    listed = selection.ids_by_suspicion()
    if samples.checked is not None:
        listed = listed[~samples.checked[listed]]
    folds = run.directory.fold_metrics().items()
    metrics = [read_metrics(path) for (round_, _), path in folds if round_ == 0]
    ahead, error = _gain(report)
    return Signals(
        samples=len(given),
        classes=samples.classes,
        chance=float(np.bincount(given).max() / len(given)),
        agreement=first["agreement"],
        agreement_each=tuple(first.get("agreement_each") or ()),
        estimate=float(noise[noise["stated"]]),
        other_estimate=noise["confident"] if noise["stated"] == "paper" else noise["paper"],
        repeated=_share(repeated, np.arange(len(samples.given))),
        repeated_listed=_share(repeated, listed[:LISTED]),
        train_accuracy=_last(metrics, "train_accuracy"),
        steps=int(_last(metrics, "step") or 0) or None,
        rare_classes=rare_classes(samples, selection),
        gain=ahead,
        gain_error=error,
        train_loss=_last(metrics, "loss"),
        checked=0 if samples.checked is None else int(samples.checked.sum()),
        flips=(flips := incv["noise"].get("uniform_flips")),
        listed_flipped=None
        if flips is None
        else share_flipped(selection.given_probability[listed[:LISTED]], flips, samples.classes),
    )


def share_flipped(given_probability: NDArray[np.float32], flips: float, classes: int) -> float:
    """Return the mean probability that these labels are random flips, of which each class gets the same share.

    Args:
        given_probability: calibrated probabilities of the given labels.
        flips: share of all labels that are flipped at random.
        classes: their number.
    """
    known = given_probability[np.isfinite(given_probability)]
    return float(np.minimum(1, flips / (classes - 1) / np.maximum(known, 1e-12)).mean()) if len(known) else 0.0


def stated_estimate(noise: dict[str, Any], rule: str | None) -> tuple[str, float] | None:
    """Return name and value of the noise estimate that a report states; None if there is none.

    It is the estimate that the recipe's rules use. In place of the confident one it is the confirmed one, which two
    rounds support, if it is known.
    """
    names = {
        "paper": ("paper", "confident"),
        "confidence_curve": ("confidence_curve", "confident", "paper"),
        "combined": ("combined", "confident", "paper"),
    }.get(rule or "", ("confirmed", "confident", "paper"))
    for name in names:
        if noise.get(name) is not None:
            return name, float(noise[name])
    return None


def confirmed_noise(
    run: ReportRun, samples: RunSamples, selection: SelectionIndex | None, repeated: Repeated
) -> float | None:
    """Return the share of labels that first and last round contradict by the same class, the last one confidently.

    Networks that do not memorise also contradict difficult images twice, but rarely with confidence. None unless
    every sample that is not selected was predicted in several rounds: removed samples are not.
    """
    rounds = len(run.rounds("predictions.parquet"))
    if selection is None or rounds < 2 or not samples.inside.any():
        return None
    inside = _trained(samples, selection)
    state = selection.state[inside]
    if (state == State.REMOVED).any():
        return None
    open_ = inside[state == State.CANDIDATE]
    if (repeated[open_] < 0).any() or np.isnan(selection.predicted_probability[open_]).any():
        return None
    known = inside[np.isfinite(selection.given_probability[inside])]
    confident = np.zeros(len(selection.state), np.bool_)
    confident[known] = are_confident(
        samples.given[known],
        selection.predicted[known],
        selection.given_probability[known],
        selection.predicted_probability[known],
        samples.classes,
    )
    return float(((repeated[open_] == 1) & confident[open_]).sum() / len(inside))


def read_repeated(run: ReportRun, samples: RunSamples) -> Repeated:
    """Read the predictions of all rounds, and compare those of each sample."""
    rounds = []
    for path in run.rounds("predictions.parquet").values():
        table = run.read(path)
        ids, predicted = (table[name].to_numpy() for name in ("sample_id", "predicted"))
        usable = table["status"].to_numpy() == Status.OK
        rounds.append((ids[usable], predicted[usable]))
    return repeated_predictions(rounds, samples.given)


def repeated_predictions(rounds: Iterable[RoundPredictions], given: NDArray[np.int32]) -> Repeated:
    """Compare the first and the last prediction of each sample, by sample_id: int8 [samples].

    1: both contradict the given label with the same class; 0: the last contradicts it with another class than the
    first; -1: predicted less than twice, or the last prediction agrees.
    """
    first = np.full(len(given), -1, np.int32)
    last, count = first.copy(), np.zeros(len(given), np.int32)
    for ids, predicted in rounds:
        first[ids] = np.where(count[ids] == 0, predicted, first[ids])
        last[ids] = predicted
        count[ids] += 1
    judged = (count >= 2) & (last != given)
    return np.where(judged, first == last, -1).astype(np.int8)


def rare_classes(samples: RunSamples, selection: SelectionIndex) -> tuple[str, ...]:
    """Return the classes with less than 5 selected samples, or with a far smaller selected share than usual."""
    inside = _trained(samples, selection)
    given = samples.given[inside]
    total = np.bincount(given, minlength=samples.classes)
    kept = np.bincount(given[selection.state[inside] == State.SELECTED], minlength=samples.classes)
    present = total > 0
    shares = np.divide(kept, total, out=np.zeros(len(total)), where=present)
    usual = float(np.median(shares[present])) if present.any() else 0.0
    rare = present & ((kept < np.minimum(_RARE_COUNT, total)) | (shares < usual * _RARE_SHARE))
    return tuple(samples.names[number] for number in np.flatnonzero(rare))


def _trained(samples: RunSamples, selection: SelectionIndex) -> NDArray[np.int64]:
    """Return the sample_ids that INCV judges: those of the run, except the ones held out for evaluation."""
    judged = selection.state != State.HELD_OUT
    return np.flatnonzero(samples.inside[: len(judged)] & judged)


def _share(repeated: Repeated, ids: NDArray[np.int64]) -> float | None:
    judged = repeated[ids][repeated[ids] >= 0]
    return float(judged.mean()) if len(judged) >= _FEW_REPEATED else None


def _last(metrics: list[dict[str, list[float | None]]], key: str) -> float | None:
    """Return the mean over folds of a metric's last value."""
    values = [value for columns in metrics if (value := (columns.get(key) or [None])[-1]) is not None]
    return mean(values) if values else None


def _gain(report: dict[str, Any]) -> tuple[float | None, float]:
    """Return the gain of the headline method over standard training, in points, and two standard errors of it."""
    found = first_set(report)
    method = method_with(report, "headline", found[1]) if found else None
    ahead = gain(report, found[1], method) if found and method else None
    if found is None or method is None or ahead is None:
        return None, 0.0
    accuracy, count = found[1][method]["top1"] / 100, found[1][method]["count"]
    return ahead[0], 200.0 * float(np.sqrt(2 * accuracy * (1 - accuracy) / max(count, 1)))
