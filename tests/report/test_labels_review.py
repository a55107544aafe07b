"""The list of labels to review, from arrays: which samples, in which order, with which values."""

import itertools
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report.labels_review import ReviewedSamples, build_review, write_review

NAMES = ("ant", "bee", "=cow")


def drawn(seed: int, root: str | None = "/images/") -> tuple[SelectionIndex, ReviewedSamples]:
    """A selection over random samples, as INCV leaves it: what has no prediction has no numbers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 60))
    state = rng.integers(0, len(State), count).astype(np.int8)
    judged = np.isin(state, (State.CANDIDATE, State.SELECTED, State.REMOVED, State.HELD_OUT))
    outside = state == State.OUTSIDE
    loss = np.where(judged, np.round(rng.exponential(2.0, count), 1), np.nan).astype(np.float32)
    selection = SelectionIndex(
        state=state,
        round=np.where(outside, -1, rng.integers(0, 4, count)).astype(np.int16),
        predicted=np.where(judged, rng.integers(0, 3, count), -1).astype(np.int32),
        loss=loss,
        given_probability=np.exp(-loss),
        predicted_probability=np.where(judged, rng.random(count), np.nan).astype(np.float32),
    )
    why = rng.integers(0, 3, count)
    rejected, excluded = outside & (why == 0), outside & (why == 1)
    samples = ReviewedSamples(
        keys=pa.chunked_array([[f"train/{number}.png" for number in range(count)]], pa.string()),
        given=np.where(outside & ~rejected, -1, rng.integers(0, 3, count)),
        rejected=rejected,
        excluded=excluded,
        checked=~outside & (rng.random(count) < 0.2),
        class_names=NAMES,
        root=root,
    )
    return selection, samples


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_sample_of_the_run_is_listed_once_by_suspicion(seed):
    selection, samples = drawn(seed)
    rows = build_review(selection, samples).to_pylist()
    listed = [row["sample_id"] for row in rows]
    expected = np.flatnonzero((selection.state != State.OUTSIDE) | samples.rejected | samples.excluded)
    assert sorted(listed) == expected.tolist()
    order = [(row["checked"], math.inf if row["label_quality"] is None else row["label_quality"]) for row in rows]
    assert order == sorted(order)
    for first, second in itertools.pairwise(rows):
        tied = first["loss"] == second["loss"] and first["checked"] == second["checked"]
        assert not tied or first["sample_id"] < second["sample_id"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_row_says_what_the_selection_says(seed):
    selection, samples = drawn(seed)
    for row in build_review(selection, samples).to_pylist():
        number = row["sample_id"]
        state, given_label = State(int(selection.state[number])), int(samples.given[number])
        assert row["key"] == f"train/{number}.png"
        assert row["path"] == f"/images/train/{number}.png"
        assert row["given_label"] == (NAMES[given_label] if given_label >= 0 else None)
        outside = "rejected" if samples.rejected[number] else "excluded"
        assert row["state"] == (outside if state == State.OUTSIDE else state.name.lower())
        contradicted = selection.predicted[number] != given_label
        issue = state in (State.CANDIDATE, State.REMOVED) or (state == State.HELD_OUT and contradicted)
        assert row["is_label_issue"] == (issue and not samples.checked[number])
        assert row["checked"] == (samples.checked[number] or samples.excluded[number])
        assert row["corrected_label"] is None
        assert row["round"] == (None if state == State.OUTSIDE else selection.round[number] + 1)
        if np.isnan(selection.loss[number]):
            assert {row[name] for name in ("predicted_label", "label_quality", "loss")} == {None}
        else:
            assert row["predicted_label"] == NAMES[selection.predicted[number]]
            assert row["label_quality"] == selection.given_probability[number]
            assert row["predicted_probability"] == selection.predicted_probability[number]
            assert row["loss"] == selection.loss[number]


def test_keys_that_are_no_paths_give_no_path():
    assert set(build_review(*drawn(1, root=None))["path"].to_pylist()) == {None}


def test_a_loss_of_nothing_has_no_sign(tmp_path: Path):
    """-log(1) is -0.0, which a CSV would show as a negative number."""
    selection, samples = drawn(3)
    selection.loss[:] = -0.0
    run = RunDirectory(tmp_path)
    write_review(run, build_review(selection, samples))
    assert ",-0" not in run.labels_review_csv.read_text()


def test_the_csv_is_escaped_and_the_parquet_is_not(tmp_path: Path):
    run = RunDirectory(tmp_path)
    selection, samples = drawn(5)
    table = build_review(selection, samples)
    assert "=cow" in table["given_label"].to_pylist()
    write_review(run, table)
    assert pq.read_table(run.labels_review_parquet).equals(table)
    text = run.labels_review_csv.read_text()
    assert '"\'=cow"' in text
    assert '"=cow"' not in text


def test_existing_files_are_kept_where_asked(tmp_path: Path):
    run, table = RunDirectory(tmp_path), build_review(*drawn(2))
    run.labels_review_csv.write_text("edited")
    write_review(run, table, keep_existing=True)
    assert run.labels_review_csv.read_text() == "edited"
    assert pq.read_table(run.labels_review_parquet).equals(table)
    write_review(run, table)
    assert run.labels_review_csv.read_text().startswith('"key"')
