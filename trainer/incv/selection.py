"""The selection in Algorithms 1 and 2: from held-out predictions to selected and removed samples."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.incv.predictions import Predictions
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.sample_order import Ids
from trainer.passes import Status

_MEASURED = ("predicted", "loss", "given_probability", "predicted_probability")


@dataclass(frozen=True)
class PartDecision:
    """The selected samples S_f and removed samples R_f of one held-out part; R_f excludes S_f."""

    selected: Ids
    removed: Ids


def decide_part(part: Predictions, remove_ratio: float) -> PartDecision:
    """Select the samples whose prediction agrees; remove the floor(r |S_f|) largest losses (Algorithm 2, lines 6-7).

    r is `remove_ratio`. Of equal losses, the one with the smaller sample_id is removed first. Unreadable and
    non-finite rows are neither selected nor removed.
    """
    usable = part.rows(part.usable())
    selected = usable.sample_id[usable.agrees]
    worst = np.lexsort((usable.sample_id, -usable.loss))[: math.floor(remove_ratio * len(selected))]
    removed = np.setdiff1d(usable.sample_id[worst], selected)
    return PartDecision(selected, removed)


def apply_round(
    before: SelectionIndex,
    predictions: Predictions,
    round_: int,
    remove_ratio: float,
    checked: Ids | None = None,
) -> SelectionIndex:
    """Return the index after applying the decisions for all parts of a round (Algorithm 2, line 14).

    Only candidates are decided on; other samples get their predictions. checked: samples whose label was checked by
    hand; they are selected whatever the prediction.
    """
    ids = predictions.sample_id
    state, rounds = before.state.copy(), before.round.copy()
    measured = {name: getattr(before, name).copy() for name in _MEASURED}
    for name, column in measured.items():
        column[ids] = getattr(predictions, name)
    rounds[ids] = round_
    open_ = before.state[ids] == State.CANDIDATE
    known = open_ & np.isin(ids, checked) if checked is not None else np.zeros(len(ids), bool)
    candidates = predictions.rows(open_ & ~known)
    for fold in np.unique(candidates.fold):
        part = decide_part(candidates.of_fold(fold), remove_ratio)
        state[part.selected] = State.SELECTED
        state[part.removed] = State.REMOVED
    state[ids[known]] = State.SELECTED
    # A held-out sample is predicted in every round: the last prediction decides whether it is usable.
    state[ids[np.isin(before.state[ids], (State.UNREADABLE, State.NON_FINITE))]] = State.HELD_OUT
    state[ids[predictions.status == Status.UNREADABLE]] = State.UNREADABLE
    state[ids[predictions.status == Status.NON_FINITE]] = State.NON_FINITE
    return SelectionIndex(state, rounds, **measured)


@dataclass(frozen=True)
class FilledClass:
    """A class with too few selected samples: how many it had, and how many were added by smallest loss."""

    label: int
    selected: int
    filled: int


def fill_classes(
    index: SelectionIndex, labels: npt.NDArray[np.int64], classes: int, least: int
) -> tuple[SelectionIndex, list[FilledClass]]:
    """Select more samples, by smallest loss, in each class that has fewer than `least`, as far as available."""
    state = index.state.copy()
    filled = []
    inside = np.flatnonzero(index.state != State.OUTSIDE)
    selected = np.bincount(labels[state == State.SELECTED], minlength=classes)
    for label in np.flatnonzero(selected < least):
        of_class = inside[labels[inside] == label]
        spare = of_class[np.isin(state[of_class], (State.CANDIDATE, State.REMOVED))]
        easiest = spare[np.lexsort((spare, index.loss[spare]))][: least - selected[label]]
        state[easiest] = State.SELECTED
        filled.append(FilledClass(int(label), int(selected[label]), len(easiest)))
    return replace(index, state=state), filled
