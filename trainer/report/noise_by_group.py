"""How noisy the labels of each class and of each source are, and which classes the labels confuse."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.incv.confident import confident_joint
from trainer.incv.measure import confusion_counts, or_none
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report.measured import WORST_PAIRS, RunSamples, read_columns
from trainer.report.sources import SampleSources
from trainer.report.suspects import flagged_ids

EXCERPT = 20  # classes in the excerpt of a transition matrix that is too large to show


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The usable held-out predictions of round 1, of samples of the run; arrays [rows]."""

    ids: NDArray[np.int64]
    given: NDArray[np.int64]
    predicted: NDArray[np.int32]
    given_probability: NDArray[np.float32]
    predicted_probability: NDArray[np.float32]

    def joint(self, rows: NDArray[np.bool_] | slice, classes: int) -> NDArray[np.float64]:
        """Return the estimated joint distribution of given and true labels among some rows."""
        return confident_joint(
            self.given[rows],
            self.predicted[rows],
            self.given_probability[rows],
            self.predicted_probability[rows],
            classes,
        )


def read_held_out(run: RunDirectory, samples: RunSamples) -> HeldOut | None:
    """Read the predictions of round 1, which cover every sample; None if there are none."""
    path = run.round_predictions(0)
    if not path.exists():
        return None
    names = ("sample_id", "predicted", "status", "given_probability", "predicted_probability")
    ids, predicted, status, given_probability, predicted_probability = read_columns(path, *names)
    usable = (status == 0) & (ids < len(samples.given))
    usable[usable] = samples.inside[ids[usable]]
    columns = (predicted, given_probability, predicted_probability)
    chosen = ids[usable]
    return HeldOut(chosen, samples.given[chosen].astype(np.int64), *(column[usable] for column in columns))


def describe_labels(
    selection: SelectionIndex, samples: RunSamples, joint: NDArray[np.float64] | None
) -> list[dict[str, Any]]:
    """Return for each given label: counts, the estimated and true share of wrong labels, and the usual suggestion.

    joint: the estimated joint distribution of given and true labels.
    """
    flagged = flagged_ids(selection, samples)
    flagged = flagged[samples.inside[flagged]]
    rows = _describe(samples.given, samples.classes, selection, samples, flagged)
    suggestions = confusion_counts(samples.given[flagged], selection.predicted[flagged], samples.classes)
    for label, row in enumerate(rows):
        usual = int(suggestions[label].argmax())
        count = int(suggestions[label, usual])
        row |= {"suggested": usual if count else None, "suggested_count": count}
        held = 0.0 if joint is None else float(joint[label].sum())
        row["estimated_wrong"] = None if joint is None or not held else 1 - float(joint[label, label]) / held
    return rows


def describe_sources(
    selection: SelectionIndex, samples: RunSamples, held_out: HeldOut | None, sources: SampleSources | None
) -> list[dict[str, Any]] | None:
    """Return for each source: name, counts, and the estimated and true share of wrong labels; None without any."""
    if sources is None:
        return None
    numbers = np.full(len(samples.given), -1, np.int64)
    shared = min(len(numbers), len(sources.numbers))
    numbers[:shared] = sources.numbers[:shared]
    flagged = flagged_ids(selection, samples)
    flagged = flagged[samples.inside[flagged]]
    rows = _describe(numbers, len(sources.names), selection, samples, flagged)
    for number, row in enumerate(rows):
        row |= {"name": sources.names[number], "estimated_wrong": None}
        if held_out is not None and (among := numbers[held_out.ids] == number).any():
            row["estimated_wrong"] = 1 - float(np.trace(held_out.joint(among, samples.classes)))
    return rows


def _describe(
    groups: NDArray[np.integer],
    count: int,
    selection: SelectionIndex,
    samples: RunSamples,
    flagged: NDArray[np.int64],
) -> list[dict[str, Any]]:
    """Count samples, selected, flagged and truly wrong labels of each group. groups: by sample_id, -1: in none."""
    state = np.full(len(groups), State.OUTSIDE, np.int8)
    state[: len(selection.state)] = selection.state
    inside = samples.inside & (groups >= 0)
    total, selected, wrong, known = (
        np.bincount(groups[inside & mask], minlength=count)
        for mask in (
            samples.inside,
            state == State.SELECTED,
            samples.measurable & (samples.given != (samples.given if samples.truth is None else samples.truth)),
            samples.measurable,
        )
    )
    doubted = np.bincount(groups[flagged][groups[flagged] >= 0], minlength=count)
    return [
        {
            "samples": int(total[group]),
            "selected": int(selected[group]),
            "flagged": int(doubted[group]),
            "wrong": float(wrong[group] / known[group]) if known[group] else None,
        }
        for group in range(count)
    ]


def estimated_pairs(joint: NDArray[np.float64], samples: int) -> list[dict[str, Any]]:
    """Return the classes that the labels are estimated to confuse most: from the true class to the given label.

    Each has the estimated number of labels, and their share of the true class. joint: [given, true].
    """
    wrong = joint.T.copy()  # [true, given]
    totals = wrong.sum(axis=1)
    np.fill_diagonal(wrong, 0.0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:WORST_PAIRS]
    pairs = [(int(place // len(wrong)), int(place % len(wrong))) for place in order]
    return [
        {"from": i, "to": j, "count": round(float(wrong[i, j]) * samples), "share": or_none(wrong[i, j] / totals[i])}
        for i, j in pairs
        if wrong[i, j] * samples >= 0.5
    ]


def excerpt(joint: NDArray[np.float64], pairs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the part of the estimated transition matrix that has the most confused classes: {classes, matrix}."""
    classes = sorted(list(dict.fromkeys(each[end] for each in pairs for end in ("from", "to")))[:EXCERPT])
    if len(classes) < 2:
        return None
    true = joint.T
    totals = true.sum(axis=1)[classes]
    part = true[np.ix_(classes, classes)]
    matrix = np.divide(part, totals[:, None], out=np.full(part.shape, np.nan), where=totals[:, None] > 0)
    return {"classes": classes, "matrix": np.round(matrix, 5).tolist()}
