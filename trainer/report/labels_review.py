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
from trainer.report.findings import CHECKS, LEAK, Findings, gather_findings

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
    """Whether features judged the labels: closer calls are not flagged then."""


def build_review(selection: SelectionIndex, samples: ReviewedSamples) -> pa.Table:
    """Return the list: the samples of the run by suspicion, then those without a prediction, then the checked ones.

    An excluded sample counts as checked. Samples outside the run are left out, unless they were rejected or excluded.
    """
    state = selection.state.astype(np.int64)
    state[samples.excluded] = _EXCLUDED
    state[samples.rejected] = _REJECTED
    checked = samples.checked | (state == _EXCLUDED)
    more, conflicts = {}, np.zeros(len(state), np.bool_)
    if samples.examined is not None:
        findings = gather_findings(samples.examined, samples.given, selection.given_probability, checked)
        more, conflicts = _finding_columns(findings), findings.contradicted
    ids = selection.ids_by_suspicion()
    ids = ids[np.lexsort((~conflicts[ids], checked[ids]))]
    ids = ids[state[ids] != State.OUTSIDE]
    state, checked = state[ids], checked[ids]
    issue = (state == State.CANDIDATE) | (state == State.REMOVED)
    predicted = selection.predicted[ids]
    issue |= (state == State.HELD_OUT) & (predicted >= 0) & (predicted != samples.given[ids])
    issue &= ~checked
    if samples.calibrated:
        issue &= are_doubted(selection.loss[ids], predicted == samples.given[ids])
        issue |= conflicts[ids]
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


def _finding_columns(findings: Findings) -> dict[str, pa.Array]:
    """Return the columns on duplicates and bad pictures, by sample_id."""
    checks = np.full(len(findings.groups), None, object)
    for name in CHECKS:
        for number in np.flatnonzero(findings.kinds[name]):
            checks[number] = f"{checks[number]}, {name}" if checks[number] else name
    return {
        "duplicates": pa.array(findings.groups, pa.int64(), mask=findings.groups < 0),
        "conflicting_duplicate": pa.array(findings.contradicted),
        "off_topic": pa.array(findings.kinds["off_topic"]),
        "image_check": pa.array(checks, pa.string()),
    } | ({} if findings.leaks is None else {LEAK: pa.array(findings.leaks, pa.string())})


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
