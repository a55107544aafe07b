"""From held-out predictions to selected and removed samples: invariants of Algorithms 1 and 2, no network."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import DataError
from tests.support.prediction_rows import rows, shuffled
from trainer.config.schema import IncvConfig
from trainer.incv.folds import split_parts
from trainer.incv.predictions import Predictions, Status, merge_predictions
from trainer.incv.selection import FilledClass, apply_round, decide_part, fill_classes
from trainer.incv.selection_index import SelectionIndex, State

OK, UNREADABLE, NON_FINITE = Status.OK, Status.UNREADABLE, Status.NON_FINITE
streams = st.integers(0, 2**64 - 1)
COLUMNS = tuple(SelectionIndex.__dataclass_fields__)


def id_lists(least: int = 0, most: int = 120) -> st.SearchStrategy[np.ndarray]:
    ids = st.lists(st.integers(0, 10**7), min_size=least, max_size=most, unique=True)
    return ids.map(lambda values: np.array(values, np.int64))


# --- halves


@settings(max_examples=60, deadline=None)
@given(streams, id_lists())
def test_halves_are_a_partition_into_near_equal_parts(stream, candidates):
    first, second = split_parts(stream, candidates)
    np.testing.assert_array_equal(np.sort(np.concatenate([first, second])), np.sort(candidates))
    assert abs(len(first) - len(second)) <= 1


@settings(max_examples=60, deadline=None)
@given(streams, id_lists(), st.randoms(use_true_random=False))
def test_halves_depend_on_the_stream_and_the_set_of_ids_alone(stream, candidates, random):
    other_order = candidates.tolist()
    random.shuffle(other_order)
    before = candidates.copy()
    for one, other in zip(
        split_parts(stream, candidates), split_parts(stream, np.array(other_order, np.int64)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(candidates, before)


@settings(max_examples=40, deadline=None)
@given(streams, streams, id_lists(least=40, most=60))
def test_another_stream_gives_other_halves(one, other, candidates):
    if one != other:
        assert set(split_parts(one, candidates)[0]) != set(split_parts(other, candidates)[0])


def test_halves_are_drawn_at_random():
    """Over many rounds each sample is in the first half about half of the time, and no two always together."""
    candidates = np.arange(1000, 1040)
    in_first = np.array([np.isin(candidates, split_parts(stream, candidates)[0]) for stream in range(600)])
    standard_error = math.sqrt(0.25 / len(in_first))
    assert np.abs(in_first.mean(axis=0) - 0.5).max() < 5 * standard_error
    together = (in_first[:, :, None] == in_first[:, None, :]).mean(axis=0)[~np.eye(40, dtype=bool)]
    assert np.abs(together - 19 / 39).max() < 5 * standard_error


@settings(max_examples=60, deadline=None)
@given(streams, id_lists(), st.integers(2, 12))
def test_parts_of_any_number_are_a_partition_into_near_equal_ones(stream, candidates, folds):
    parts = split_parts(stream, candidates, folds)
    assert len(parts) == folds
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(candidates))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert IncvConfig(epochs=1, folds=folds).largest_fold(len(candidates)) == len(candidates) - min(map(len, parts))


def test_halves_of_almost_nothing():
    assert [len(half) for half in split_parts(3, np.array([], np.int64))] == [0, 0]
    assert [len(half) for half in split_parts(3, np.array([8]))] == [1, 0]


# --- one held-out half


@st.composite
def halves(draw: st.DrawFn) -> Predictions:
    """Rows with few different losses, so that ties abound, in any order of ids."""
    ids = draw(id_lists(most=40))
    agrees, loss, status = [], [], []
    for _ in ids:
        agrees.append(draw(st.booleans()))
        loss.append(draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 7.5])))
        status.append(draw(st.sampled_from([OK, OK, OK, UNREADABLE, NON_FINITE])))
    return rows(ids, agrees, loss, status=status)


def slow_decision(half: Predictions, ratio: float) -> tuple[set[int], set[int]]:
    """Lines 6 and 7 of Algorithm 2, read aloud."""
    usable = [
        (float(-loss), int(sample), bool(agrees))
        for sample, agrees, loss, status in zip(half.sample_id, half.agrees, half.loss, half.status, strict=True)
        if status == OK
    ]
    selected = {sample for _, sample, agrees in usable if agrees}
    count = math.floor(ratio * len(selected))
    worst = {sample for _, sample, _ in sorted(usable)[:count]}
    return selected, worst - selected


@settings(max_examples=100, deadline=None)
@given(halves(), st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 1.5, 2.0]))
def test_a_half_is_decided_as_algorithm_2_says(half, ratio):
    decision = decide_part(half, ratio)
    selected, removed = slow_decision(half, ratio)
    assert set(decision.selected.tolist()) == selected
    assert set(decision.removed.tolist()) == removed
    assert len(decision.selected) == len(selected)
    assert len(decision.removed) == len(removed)


@settings(max_examples=60, deadline=None)
@given(halves(), st.sampled_from([0.25, 1.0, 2.0]), st.integers(0, 2**32 - 1))
def test_a_half_is_decided_the_same_in_any_order_of_rows(half, ratio, seed):
    one, other = decide_part(half, ratio), decide_part(shuffled(half, seed), ratio)
    np.testing.assert_array_equal(np.sort(one.selected), np.sort(other.selected))
    np.testing.assert_array_equal(np.sort(one.removed), np.sort(other.removed))


def test_agreeing_samples_are_selected_and_the_largest_losses_removed():
    half = rows([10, 11, 12, 13, 14], [True, False, True, False, False], [0.1, 5.0, 0.2, 6.0, 1.0])
    decision = decide_part(half, 0.5)  # n = floor(0.5 * 2) = 1
    assert decision.selected.tolist() == [10, 12]
    assert decision.removed.tolist() == [13]


def test_ties_in_the_loss_go_to_the_smaller_id():
    half = rows([30, 7, 19, 4], [False, False, False, True], [2.0, 2.0, 2.0, 0.1])
    assert decide_part(half, 2.0).removed.tolist() == [7, 19]


def test_a_sample_both_selected_and_among_the_worst_is_selected_and_not_replaced():
    """The worst two are 0 and 2; 0 agrees (possible with top-k agreement), and 3 does not step into its place."""
    half = rows([0, 1, 2, 3], [True, True, False, False], [9.0, 1.0, 5.0, 4.0])
    decision = decide_part(half, 1.0)
    assert decision.selected.tolist() == [0, 1]
    assert decision.removed.tolist() == [2]


@pytest.mark.parametrize(
    ("selected", "ratio", "removed"),
    [(9, 0.1, 0), (10, 0.1, 1), (19, 0.1, 1), (30, 0.1, 3), (0, 2.0, 0), (3, 0.0, 0), (3, 2.0, 6)],
)
def test_removed_are_the_floor_of_r_times_selected(selected, ratio, removed):
    """The released code's x[-int(r * n):] takes everything where r * n rounds to 0."""
    half = rows(np.arange(50), np.arange(50) < selected, np.where(np.arange(50) < selected, 0.01, 3.0))
    assert len(decide_part(half, ratio).removed) == removed


@pytest.mark.parametrize("status", [UNREADABLE, NON_FINITE])
def test_unusable_rows_are_neither_selected_nor_removed_nor_counted(status):
    """Whatever is in their other columns: NaN must not be read as "noisy label"."""
    usable = rows([0, 1, 2, 3], [True, False, False, False], [0.1, 3.0, 2.0, 1.0])
    broken = rows([4, 5, 6], [True, True, False], [np.inf, 50.0, np.nan])
    broken = replace(broken, status=np.full(3, status, np.int8))
    both = merge_predictions([usable, broken], np.arange(7))
    decision = decide_part(both, 1.0)
    assert decision.selected.tolist() == [0]
    assert decision.removed.tolist() == [1]
    assert both.agreement() == 1 / 4


# --- rounds


def drawn_round(rng: np.random.Generator, index: SelectionIndex, number: int) -> Predictions:
    """Predictions of all candidates by two made-up folds, a few of them unusable."""
    candidates = index.ids(State.CANDIDATE)
    parts = []
    for fold, ids in enumerate(split_parts(number, candidates)):
        status = rng.choice([OK, OK, OK, OK, OK, UNREADABLE, NON_FINITE], len(ids))
        agrees = rng.random(len(ids)) < 0.4
        loss = rng.integers(0, 6, len(ids)) / 4  # with ties
        predicted = rng.integers(0, 5, len(ids))
        parts.append(rows(ids, agrees, loss, fold=fold, predicted=predicted, status=status))
    return merge_predictions(parts, candidates)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.25, 1.0, 2.0]))
def test_rounds_keep_the_laws_of_the_index(seed, ratio):
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, 120))
    inside = np.flatnonzero(rng.random(samples) < 0.9)
    index = SelectionIndex.of_candidates(samples, inside)
    for number in range(3):
        candidates = index.ids(State.CANDIDATE)
        predictions = drawn_round(rng, index, number)
        before = {name: getattr(index, name).copy() for name in COLUMNS}
        after = apply_round(index, predictions, number, ratio)
        for name in COLUMNS:  # the index before the round is not written to
            np.testing.assert_array_equal(getattr(index, name), before[name])
        decided = np.setdiff1d(np.arange(samples), candidates)  # S, removed, unusable and OUTSIDE
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(after, name)[decided], before[name][decided])
        every = np.concatenate([after.ids(state) for state in State])
        np.testing.assert_array_equal(np.sort(every), np.arange(samples))
        np.testing.assert_array_equal(after.ids(State.OUTSIDE), np.setdiff1d(np.arange(samples), inside))
        assert (after.round[candidates] == number).all()
        for name in ("predicted", "loss", "given_probability", "predicted_probability"):
            np.testing.assert_array_equal(getattr(after, name)[predictions.sample_id], getattr(predictions, name))
        expected = [slow_decision(predictions.of_fold(fold), ratio) for fold in (0, 1)]
        expected_states = {
            State.SELECTED: expected[0][0] | expected[1][0],
            State.REMOVED: expected[0][1] | expected[1][1],
            State.UNREADABLE: set(predictions.sample_id[predictions.status == UNREADABLE].tolist()),
            State.NON_FINITE: set(predictions.sample_id[predictions.status == NON_FINITE].tolist()),
        }
        for state, ids in expected_states.items():
            assert set(np.setdiff1d(after.ids(state), decided).tolist()) == ids, state
        index = after


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.25, 1.0]))
def test_a_round_does_not_depend_on_the_order_of_rows_or_the_numbering_of_folds(seed, ratio):
    rng = np.random.default_rng(seed)
    index = SelectionIndex.of_candidates(80, np.arange(3, 80))
    predictions = drawn_round(rng, index, 0)
    expected = apply_round(index, predictions, 0, ratio)
    swapped = replace(predictions, fold=(1 - predictions.fold).astype(np.int8))
    for other in (shuffled(predictions, seed), swapped):
        found = apply_round(index, other, 0, ratio)
        assert found.checksum() == expected.checksum()
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_each_half_removes_by_its_own_count():
    """Fold 0 selects two and removes two; fold 1 selects none, so its still larger losses stay candidates."""
    first = rows([0, 1, 2, 3, 4], [True, True, False, False, False], [0.1, 0.1, 1.0, 2.0, 0.5], fold=0)
    second = rows([5, 6], [False, False], [90.0, 80.0], fold=1)
    index = SelectionIndex.of_candidates(7, np.arange(7))
    index = apply_round(index, merge_predictions([first, second], np.arange(7)), 0, 1.0)
    assert index.ids(State.SELECTED).tolist() == [0, 1]
    assert index.ids(State.REMOVED).tolist() == [2, 3]
    assert index.ids(State.CANDIDATE).tolist() == [4, 5, 6]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 2.0]))
def test_checked_samples_are_selected_and_leave_the_other_decisions_alone(seed, ratio):
    rng = np.random.default_rng(seed)
    index = SelectionIndex.of_candidates(60, np.arange(60))
    checked = np.flatnonzero(rng.random(60) < 0.3)
    predictions = drawn_round(rng, index, 0)
    after = apply_round(index, predictions, 0, ratio, checked)
    usable = predictions.sample_id[predictions.usable()]
    assert (after.state[np.intersect1d(checked, usable)] == State.SELECTED).all()
    others = predictions.rows(~np.isin(predictions.sample_id, checked))
    alone = apply_round(index, others, 0, ratio)
    np.testing.assert_array_equal(after.state[others.sample_id], alone.state[others.sample_id])
    unusable = np.setdiff1d(predictions.sample_id, usable)
    assert set(after.state[unusable].tolist()) <= {State.UNREADABLE, State.NON_FINITE}


def test_held_out_samples_are_predicted_but_neither_selected_nor_removed_nor_counted():
    """Without them the decisions are the same, although both agree or have the largest losses."""
    index = SelectionIndex.of_candidates(6, np.arange(4), held_out=np.array([4, 5]))
    halves = [
        rows([0, 1, 4], [True, False, True], [0.1, 1.0, 0.2], fold=0, predicted=[3, 2, 1]),
        rows([2, 3, 5], [True, False, False], [0.1, 2.0, 99.0], fold=1, predicted=[3, 2, 0]),
    ]
    after = apply_round(index, merge_predictions(halves, np.arange(6)), 0, 1.0)
    assert after.state.tolist() == [State.SELECTED, State.REMOVED] * 2 + [State.HELD_OUT] * 2
    assert after.predicted.tolist() == [3, 2, 3, 2, 1, 0]
    assert after.round.tolist() == [0] * 6
    assert after.loss[5] == 99.0


@pytest.mark.parametrize("status", [UNREADABLE, NON_FINITE])
def test_a_held_out_sample_that_is_unusable_in_one_round_is_held_out_again_in_the_next(status):
    index = SelectionIndex.of_candidates(5, np.arange(4), held_out=np.array([4]))
    folds = [
        rows([0, 1, 4], [True, False, False], [0.1, 1.0, 1.0], fold=0, status=[OK, OK, status]),
        rows([2, 3], [True, False], [0.1, 2.0], fold=1),
    ]
    first = apply_round(index, merge_predictions(folds, np.arange(5)), 0, 0.0)
    assert first.state[4] == {UNREADABLE: State.UNREADABLE, NON_FINITE: State.NON_FINITE}[status]
    folds = [rows([1, 4], [True, True], [0.1, 0.2], fold=0), rows([3], [False], [2.0], fold=1)]
    second = apply_round(first, merge_predictions(folds, np.array([1, 3, 4])), 1, 0.0)
    assert second.state.tolist() == [State.SELECTED, State.SELECTED, State.SELECTED, State.CANDIDATE, State.HELD_OUT]


def test_an_index_begins_with_candidates_alone():
    index = SelectionIndex.of_candidates(5, np.array([1, 3]))
    assert index.ids(State.CANDIDATE).tolist() == [1, 3]
    assert index.ids(State.OUTSIDE).tolist() == [0, 2, 4]
    assert index.round.tolist() == [-1] * 5
    assert index.predicted.tolist() == [-1] * 5


# --- the index's checksum and file


def some_index() -> SelectionIndex:
    return SelectionIndex(
        state=np.array([0, 1, 2, 3, 4, 5], np.int8),
        round=np.array([-1, 0, 1, 0, 2, 1], np.int16),
        predicted=np.array([-1, 3, 4, 0, -1, -1], np.int32),
        loss=np.array([np.nan, 1.5, 0.25, 9.0, np.nan, np.nan], np.float32),
        given_probability=np.array([np.nan, 0.25, 0.75, 0.0, np.nan, np.nan], np.float32),
        predicted_probability=np.array([np.nan, 0.5, 0.75, 1.0, np.nan, np.nan], np.float32),
    )


@pytest.mark.parametrize("name", ["state", "round", "predicted"])
@pytest.mark.parametrize("row", [0, 3, 5])
def test_the_checksum_changes_with_what_was_decided(name, row):
    index = some_index()
    changed = getattr(index, name).copy()
    changed[row] += 1
    assert replace(index, **{name: changed}).checksum() != index.checksum()
    swapped = getattr(index, name)[[1, 0, 2, 3, 4, 5]]
    assert replace(index, **{name: swapped}).checksum() != index.checksum()


@pytest.mark.parametrize("name", ["loss", "given_probability", "predicted_probability"])
def test_the_checksum_does_not_change_with_floats(name):
    index = some_index()
    assert replace(index, **{name: getattr(index, name) + np.float32(1e-3)}).checksum() == index.checksum()


def test_the_checksum_is_of_values_not_of_memory():
    index = some_index()
    other = replace(index, state=index.state.astype(">i4"), round=index.round.astype(np.int64))
    assert other.checksum() == index.checksum()
    longer = SelectionIndex(**{name: np.append(getattr(index, name), getattr(index, name)[:1]) for name in COLUMNS})
    assert longer.checksum() != index.checksum()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_index_comes_back_from_its_file(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    index = SelectionIndex.of_candidates(50, np.flatnonzero(rng.random(50) < 0.8))
    index = apply_round(index, drawn_round(rng, index, 0), 0, 0.5)
    path = tmp_path_factory.mktemp("index") / "selection.parquet"
    index.write(path)
    back = SelectionIndex.read(path)
    assert back.checksum() == index.checksum()
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(back, name), getattr(index, name))
        assert getattr(back, name).dtype == getattr(index, name).dtype


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 3.0, 120.0, 130.0, np.nan]), max_size=30))
def test_suspicion_orders_all_ids_by_loss(losses):
    """Also those whose probability has underflowed to 0; equal losses by id, samples without a loss last."""
    loss = np.array(losses, np.float32)
    index = replace(SelectionIndex.of_candidates(len(loss), np.arange(len(loss))), loss=loss)
    order = index.ids_by_suspicion().tolist()
    known = [sample_id for sample_id in range(len(losses)) if losses[sample_id] == losses[sample_id]]
    expected = sorted(known, key=lambda sample_id: (-losses[sample_id], sample_id))
    assert order == expected + [sample_id for sample_id in range(len(losses)) if sample_id not in known]


@pytest.mark.parametrize("kind", [SelectionIndex, Predictions])
def test_a_broken_file_is_named(tmp_path: Path, kind):
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"table\.parquet"):
        kind.read(path)


# --- classes with too few selected samples


LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])


def judged_index() -> SelectionIndex:
    """Class 0 has three selected, class 1 one, class 2 none; 10 is outside."""
    S, C, R, U = State.SELECTED, State.CANDIDATE, State.REMOVED, State.UNREADABLE
    state = [S, S, S, C, S, C, R, C, U, C, State.OUTSIDE]
    loss = [0.1, 0.1, 0.1, 0.1, 0.1, 3.0, 2.0, 1.0, np.nan, 1.0, 0.0]
    nothing = SelectionIndex.of_candidates(11, np.arange(10))
    return replace(nothing, state=np.array(state, np.int8), loss=np.array(loss, np.float32))


def test_classes_are_filled_by_smallest_loss_and_named():
    index, filled = fill_classes(judged_index(), LABELS, 3, 2)
    assert filled == [FilledClass(label=1, selected=1, filled=1), FilledClass(label=2, selected=0, filled=2)]
    assert index.ids(State.SELECTED).tolist() == [0, 1, 2, 4, 6, 7, 9]  # 6 was removed, and is easier than 5


def test_ties_of_a_filled_class_go_to_the_smaller_id():
    index, _ = fill_classes(judged_index(), LABELS, 3, 1)
    assert index.ids(State.SELECTED).tolist() == [0, 1, 2, 4, 7]


def test_a_class_is_filled_as_far_as_it_goes():
    index, filled = fill_classes(judged_index(), LABELS, 3, 5)
    assert [(one.label, one.selected, one.filled) for one in filled] == [(0, 3, 1), (1, 1, 2), (2, 0, 2)]
    assert index.state[8] == State.UNREADABLE
    assert index.state[10] == State.OUTSIDE


def test_zero_fills_nothing():
    before = judged_index()
    index, filled = fill_classes(before, LABELS, 3, 0)
    assert filled == []
    assert index.checksum() == before.checksum()


def test_filling_does_not_write_to_the_index_it_is_given():
    before = judged_index()
    checksum = before.checksum()
    fill_classes(before, LABELS, 3, 5)
    assert before.checksum() == checksum


# --- both halves together


def test_merged_sorts_the_folds_rows():
    whole = merge_predictions([rows([9, 2], [True, False], fold=0), rows([5], [True], fold=1)], np.array([5, 9, 2]))
    assert whole.sample_id.tolist() == [2, 5, 9]
    assert whole.fold.tolist() == [0, 1, 0]
    assert whole.agrees.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("first", "second"),
    [([2, 9], []), ([2, 9], [9, 5]), ([2, 9], [2]), ([2, 9], [5, 7]), ([], [])],
    ids=["missing", "duplicate", "duplicate for a missing one", "foreign", "nothing"],
)
def test_merged_refuses_rows_that_are_not_the_candidates_exactly_once(first, second):
    parts = [rows(first, [True] * len(first)), rows(second, [True] * len(second), fold=1)]
    with pytest.raises(DataError, match="exactly once"):
        merge_predictions(parts, np.array([2, 5, 9]))
