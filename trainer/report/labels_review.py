"""The list of labels to review: every sample with its labels, probabilities and state, most suspicious first."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shards.csv_file import write_csv
from shards.durable import write_parquet
from trainer.incv.confident import are_doubted
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory

CHECKS = ("blank", "dark", "bright", "blurred", "tiny", "odd_aspect")
"""The checks of images, as in examination.parquet."""
_REJECTED, _EXCLUDED = len(State), len(State) + 1
STATE_NAMES = (*(state.name.lower() for state in State), "rejected", "excluded")


@dataclass(frozen=True, eq=False)
class ReviewedSamples:
    """What the list says about the samples besides the selection; arrays are indexed by sample_id."""

    keys: pa.ChunkedArray
    given: npt.NDArray[np.int64]
    """Given label; -1 if there is none."""
    rejected: npt.NDArray[np.bool_]
    """Whether the image was rejected when the shards were packed."""
    excluded: npt.NDArray[np.bool_]
    """Whether `labels.corrections` excludes the sample."""
    checked: npt.NDArray[np.bool_]
    """Whether `labels.corrections` corrects or confirms the label."""
    class_names: Sequence[str]
    root: str | None
    """Folder in which the keys are the paths of the images, unless they are absolute; None if they are no paths."""
    examined: pa.Table | None = None
    """What the stage `features` found besides wrong labels: a row for each of some samples."""
    calibrated: bool = False
    """Whether probabilities are calibrated, so that closer calls are not flagged."""


def build_review(selection: SelectionIndex, samples: ReviewedSamples) -> pa.Table:
    """Return the list: the samples of the run by suspicion, then those without a prediction, then the checked ones.

    An excluded sample counts as checked. Samples outside the run are left out, unless they were rejected or excluded.
    """
    state = selection.state.astype(np.int64)
    state[samples.excluded] = _EXCLUDED
    state[samples.rejected] = _REJECTED
    checked = samples.checked | (state == _EXCLUDED)
    more, conflicts = describe_examined(selection, samples)
    ids = selection.ids_by_suspicion()
    ids = ids[np.lexsort((~conflicts[ids], checked[ids]))]
    ids = ids[state[ids] != State.OUTSIDE]
    state, checked = state[ids], checked[ids]
    issue = (state == State.CANDIDATE) | (state == State.REMOVED)
    predicted = selection.predicted[ids]
    issue |= (state == State.HELD_OUT) & (predicted >= 0) & (predicted != samples.given[ids])
    issue &= ~checked
    if samples.calibrated:
        issue &= are_doubted(selection.given_probability[ids], selection.predicted_probability[ids])
        issue |= conflicts[ids] & ~checked
    keys = samples.keys.take(pa.array(ids))
    return pa.table(
        {
            "key": keys,
            "path": _join(samples.root, keys),
            "given_label": _names(samples.class_names, samples.given[ids]),
            "predicted_label": _names(samples.class_names, predicted),
            "corrected_label": pa.nulls(len(ids), pa.string()),  # for the user to fill in
            "label_quality": _known(selection.given_probability[ids]),
            "predicted_probability": _known(selection.predicted_probability[ids]),
            "loss": _known(selection.loss[ids] + np.float32(0)),  # -0.0 becomes 0.0
            "state": _names(STATE_NAMES, state),
            "round": pa.array(selection.round[ids] + 1, pa.int16(), mask=selection.round[ids] < 0),
            "is_label_issue": issue,
            "checked": checked,
            "sample_id": ids,
        }
        | {name: column.take(pa.array(ids)) for name, column in more.items()}
    )


def describe_examined(
    selection: SelectionIndex, samples: ReviewedSamples
) -> tuple[dict[str, pa.Array], npt.NDArray[np.bool_]]:
    """Return columns on duplicates and bad pictures, by sample_id, and which labels duplicates contradict."""
    count = len(selection.state)
    conflicts = np.zeros(count, np.bool_)
    table = samples.examined
    if table is None:
        return {}, conflicts
    ids = table["sample_id"].to_numpy()
    own, groups = table["group"].to_numpy(), np.full(count, -1)
    several = np.bincount(own, minlength=len(own))[own] > 1
    groups[ids[several]] = ids[own[several]]
    conflicts[ids] = find_conflicts(own, samples.given[ids], selection.given_probability[ids])
    found = {name: table[name].to_numpy() for name in CHECKS}
    words = [", ".join(name for name in CHECKS if found[name][row]) or None for row in range(len(ids))]
    checks = np.full(count, None, object)
    checks[ids] = words
    off_topic = np.zeros(count, np.bool_)
    off_topic[ids] = table["off_topic"].to_numpy()
    leaks = np.full(count, None, object)
    if "leak" in table.column_names:
        leaks[ids] = table["leak"].to_numpy(zero_copy_only=False)
    leak = {"leak": pa.array(leaks, pa.string())} if "leak" in table.column_names else {}
    return {
        "duplicates": pa.array(groups, pa.int64(), mask=groups < 0),
        "conflicting_duplicate": pa.array(conflicts),
        "off_topic": pa.array(off_topic),
        "image_check": pa.array(checks, pa.string()),
        **leak,
    }, conflicts


def find_conflicts(
    groups: npt.NDArray[np.int64], given: npt.NDArray[np.int64], probability: npt.NDArray[np.float32]
) -> npt.NDArray[np.bool_]:
    """Tell whose label differs from the label that its group of duplicates most likely has: bool [samples].

    At least so many labels are wrong, whatever the network knows.

    Args:
        groups: the row of the first image of the group of each image.
        probability: of the given label, held out; NaN if unknown.
    """
    conflicts = np.zeros(len(groups), np.bool_)
    members = np.flatnonzero(np.bincount(groups, minlength=len(groups))[groups] > 1)
    wide = int(given.max(initial=0)) + 1
    labelled, inverse = np.unique(groups[members] * wide + given[members], return_inverse=True)
    believed = np.bincount(inverse, weights=np.nan_to_num(probability[members]), minlength=len(labelled))
    order = np.lexsort((-believed, labelled // wide))
    names, first = np.unique(labelled[order] // wide, return_index=True)
    best = labelled[order][first] % wide
    conflicts[members] = best[np.searchsorted(names, groups[members])] != given[members]
    return conflicts


def write_review(run: RunDirectory, table: pa.Table, keep_existing: bool = False) -> None:
    """Write the list as Parquet and CSV. keep_existing: do not replace a file, which the user may have edited."""
    for path, write in ((run.labels_review_parquet, write_parquet), (run.labels_review_csv, write_csv)):
        if not (keep_existing and path.exists()):
            write(path, table)


def _names(names: Sequence[str], codes: npt.NDArray[np.integer]) -> pa.Array:
    """Return the name of each code; null for a negative code."""
    return pa.array(names, pa.string()).take(pa.array(codes, pa.int64(), mask=codes < 0))


def _known(values: npt.NDArray[np.float32]) -> pa.Array:
    return pa.array(values, pa.float32(), mask=np.isnan(values))


def _join(root: str | None, keys: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if root is None:
        return pa.nulls(len(keys), pa.string())
    below = pc.binary_join_element_wise(root.rstrip("/"), keys, "/")
    return pc.if_else(pc.starts_with(keys, "/"), keys, below)
