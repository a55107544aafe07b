"""Measures a run for the report: counts per round, precision and recall compared with theory, confusion."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.durable import read_parquet
from trainer import theory
from trainer.incv import measure
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import StoredLabels, read_labels

MATRIX_CLASSES = 50  # with more classes a matrix is too large to read: only its largest entries are kept
WORST_PAIRS = 15


@dataclass(frozen=True)
class RunSamples:
    """The labels of a run as dense arrays indexed by sample_id; -1 if unknown."""

    given: NDArray[np.int32]
    truth: NDArray[np.int32] | None
    inside: NDArray[np.bool_]  # whether a sample belongs to this run and is not held out (data.eval_fraction)
    names: list[str]
    checked: NDArray[np.bool_] | None = None  # whether the label was checked by hand; None: none was

    @property
    def classes(self) -> int:
        return len(self.names)

    @cached_property
    def measurable(self) -> NDArray[np.bool_]:
        """Mask of the run's samples whose true label is known."""
        return np.zeros_like(self.inside) if self.truth is None else self.inside & (self.truth >= 0)

    @cached_property
    def known(self) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """The (true, given) labels of the samples whose true label is known; None if there are none."""
        if self.truth is None or not self.measurable.any():
            return None
        return self.truth[self.measurable], self.given[self.measurable]

    def realised_noise(self) -> float | None:
        return None if self.known is None else measure.or_none(measure.realised_noise(*self.known))


def read_samples(run: RunDirectory, names: list[str], selection: SelectionIndex | None) -> RunSamples:
    """Read the given labels and, if known, the true ones. The inside has no samples that INCV did not select from.

    Without labels.parquet, there are no samples. names: the class names; unnamed classes are numbered.
    selection: the last one.
    """
    if run.labels.exists():
        labels = read_labels(run.labels)
    else:
        labels = StoredLabels(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))
    size = max(int(labels.ids.max(initial=-1)) + 1, len(selection.state) if selection else 0)
    given = _dense(labels.ids, labels.labels, size)
    truth = None
    if run.true_labels.exists():
        true_ids, true_labels = read_columns(run.true_labels, "sample_id", "label")
        here = true_ids < size
        truth = _dense(true_ids[here], true_labels[here], size)
    inside = given >= 0
    if selection is not None:
        inside[: len(selection.state)] &= ~np.isin(selection.state, (State.OUTSIDE, State.HELD_OUT))
        inside[len(selection.state) :] = False
    highest = max(int(given.max(initial=-1)), -1 if truth is None else int(truth.max(initial=-1)))
    names = names + [str(number) for number in range(len(names), highest + 1)]
    checked = labels.checked_by_id(size) if labels.checked.any() else None
    return RunSamples(given, truth, inside, names, checked)


def last_selection(run: RunDirectory) -> SelectionIndex | None:
    """Return the final selection or, in an unfinished run, that of the last finished round."""
    paths = [*run.round_files("selection.parquet").values(), run.selection]
    found = [path for path in paths if path.exists()]
    return _with_predicted_probability(SelectionIndex.read(found[-1]), run) if found else None


def _with_predicted_probability(selection: SelectionIndex, run: RunDirectory) -> SelectionIndex:
    """Add the probability of the predicted label from the rounds' predictions, if the file did not have it."""
    judged = selection.round >= 0
    if not judged.any() or np.isfinite(selection.predicted_probability[judged]).any():
        return selection
    probability = selection.predicted_probability.copy()
    for number, path in run.round_files("predictions.parquet").items():
        ids, values = read_columns(path, "sample_id", "predicted_probability")
        last = selection.round[ids] == number
        probability[ids[last]] = values[last]
    return replace(selection, predicted_probability=probability)


def measure_rounds(run: RunDirectory, samples: RunSamples, notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry per finished round, cumulative over rounds. notes: the round entries of incv.json."""
    rounds = []
    for index, path in run.round_files("selection.parquet").items():
        state = _states(SelectionIndex.read(path), len(samples.given))
        note = notes[index] if index < len(notes) else {}
        entry: dict[str, Any] = {"round": index + 1, **_counts(state, samples)}
        entry |= {key: note.get(key) for key in ("agreement", "remove_ratio", "network")}
        entry |= _against_truth(state, samples) | {"theory": _theory(samples, index + 1)}
        rounds.append(entry)
    return rounds


def describe_selection(selection: SelectionIndex | None, samples: RunSamples) -> dict[str, Any] | None:
    """Describe the last selection: counts, precision and recall (total, by true class)."""
    if selection is None:
        return None
    state = _states(selection, len(samples.given))
    entry: dict[str, Any] = {**_counts(state, samples), **_against_truth(state, samples), "by_class": None}
    if samples.known is not None:
        selected = (state == State.SELECTED)[samples.measurable]
        true, given = samples.known
        columns = (
            np.bincount(true, minlength=samples.classes),
            np.bincount(true[selected], minlength=samples.classes),
            measure.label_precision_by_class(true, given, selected, samples.classes),
            measure.label_recall_by_class(true, given, selected, samples.classes),
        )
        keys = ("samples", "selected", "label_precision", "label_recall")
        entry["by_class"] = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    return entry


def measure_confusion(run: RunDirectory, samples: RunSamples, confident: Any) -> dict[str, Any]:
    """Return T, its confident estimate, M from the held-out predictions of round 1, and the most confused pairs."""
    small = samples.classes <= MATRIX_CLASSES
    given_pairs = predicted_pairs = held_out_pairs = transition = predicted_matrix = prior = None
    predicted = _first_predictions(run, len(samples.given))
    if samples.known is not None:
        true, given = samples.known
        prior = measure.class_prior(true, samples.classes)
        transition = _rounded(measure.confusion(true, given, samples.classes)) if small else None
        given_pairs = worst_pairs(true, given, samples.classes)
        if predicted is not None:
            seen = predicted[samples.measurable]
            predicted_matrix = _rounded(measure.confusion(true, seen, samples.classes)) if small else None
            predicted_pairs = worst_pairs(true, seen, samples.classes)
    if predicted is not None:
        seen, given = predicted[samples.inside], samples.given[samples.inside]
        held_out_pairs = worst_pairs(given, seen, samples.classes)
    return {
        "prior": prior,
        "transition": transition,
        "confident": _rounded(np.array(confident, dtype=np.float64)) if small and confident else None,
        "predicted": predicted_matrix,
        "pairs": {"given": given_pairs, "predicted": predicted_pairs, "held_out": held_out_pairs},
    }


def worst_pairs(rows: measure.Labels, columns: measure.Labels, classes: int) -> list[dict[str, Any]]:
    """Return the most frequent off-diagonal pairs (from, to), each with its count and share of the class `from`."""
    counts = measure.confusion_counts(rows, columns, classes)
    totals = counts.sum(axis=1)
    np.fill_diagonal(counts, 0)
    order = np.argsort(-counts, axis=None, kind="stable")[:WORST_PAIRS]
    pairs = [(int(place // classes), int(place % classes)) for place in order]
    return [
        {"from": i, "to": j, "count": int(counts[i, j]), "share": counts[i, j] / totals[i]}
        for i, j in pairs
        if counts[i, j]
    ]


def _counts(state: NDArray[np.int8], samples: RunSamples) -> dict[str, int]:
    tally = np.bincount(state[samples.inside], minlength=len(State))
    return {
        "selected": int(tally[State.SELECTED]),
        "candidates": int(tally[State.CANDIDATE]),
        "removed": int(tally[State.REMOVED]),
        "unreadable": int(tally[State.UNREADABLE]),
        "non_finite": int(tally[State.NON_FINITE]),
    }


def _against_truth(state: NDArray[np.int8], samples: RunSamples) -> dict[str, float | None]:
    """Return label precision and recall of the selected samples, and the share of wrong labels among the removed."""
    if samples.known is None:
        return {"label_precision": None, "label_recall": None, "removed_noise": None}
    true, given = samples.known
    state = state[samples.measurable]
    selected, removed = state == State.SELECTED, state == State.REMOVED
    return {
        "label_precision": measure.or_none(measure.label_precision(true, given, selected)),
        "label_recall": measure.or_none(measure.label_recall(true, given, selected)),
        "removed_noise": measure.or_none(measure.realised_noise(true[removed], given[removed])),
    }


def _theory(samples: RunSamples, rounds: int) -> dict[str, float] | None:
    """Return label precision and recall after `rounds` rounds as the theory of a memorising network predicts them."""
    if samples.known is None:
        return None
    true, given = samples.known
    prior = measure.class_prior(true, samples.classes)
    transition = measure.confusion(true, given, samples.classes)
    absent = prior == 0
    transition[absent] = np.eye(samples.classes)[absent]  # any distribution will do: its weight is 0
    return {
        "label_precision": float(theory.label_precision_after(transition, prior, rounds)),
        "label_recall": float(theory.label_recall_after(transition, prior, rounds)),
    }


def _first_predictions(run: RunDirectory, size: int) -> NDArray[np.int32] | None:
    """Return the held-out predictions of round 1 by sample_id; -1 if missing or unusable."""
    path = run.round_predictions(0)
    if not path.exists():
        return None
    ids, predicted, status = read_columns(path, "sample_id", "predicted", "status")
    return _dense(ids[status == 0], predicted[status == 0], size)


def _states(selection: SelectionIndex, size: int) -> NDArray[np.int8]:
    state = np.full(size, State.OUTSIDE, np.int8)
    state[: len(selection.state)] = selection.state
    return state


def read_columns(path: Path, *names: str) -> list[NDArray]:
    """Read some columns of a Parquet table of the run."""
    table = read_parquet(path, "table of this run", list(names))
    return [table[name].to_numpy() for name in names]


def _dense(ids: NDArray, values: NDArray, size: int) -> NDArray[np.int32]:
    dense = np.full(size, -1, np.int32)
    dense[ids] = values
    return dense


def _rounded(matrix: NDArray[np.float64]) -> list[list[float]]:
    return np.round(matrix, 5).tolist()
