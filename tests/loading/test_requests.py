"""A rank's batch requests: the same samples and crops at any world size, each id in its place."""

from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.requests import requests_of_plan
from trainer.loading.augment import Geometry, training_boxes
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.requests import predict_requests
from trainer.loading.sample_order import Windows, derive_stream

GEOMETRY = Geometry(size=8, resize=None, pad=2, flip=True, fill="zero")
INDEX = SimpleNamespace(
    width=np.random.default_rng(0).integers(8, 20, 200).astype(np.int32),
    height=np.random.default_rng(1).integers(8, 20, 200).astype(np.int32),
    shard=np.arange(200, dtype=np.int32) % 3,
)


def requests_of(plan, first=0, rank=0, world=1):
    return list(requests_of_plan(plan, INDEX, GEOMETRY, first, rank, world))


@st.composite
def plans(draw):
    """Any subset S of the index, any C beside it, in either order."""
    scattered = draw(st.permutations(range(200)))[: draw(st.integers(1, 90))]
    selected = draw(st.integers(1, len(scattered)))
    return StaticPlan(
        derive_stream(draw(st.integers(0, 9)), "x"),
        np.array(scattered[:selected]),
        draw(st.integers(1, 20)),
        2,
        np.array(scattered[selected:], np.int64),
        candidates_from=draw(st.integers(0, 2)),
        windows=draw(st.none() | st.builds(Windows, st.just(np.arange(200) // 9), st.integers(1, 6))),
    )


def own_rows(requests):
    """What the ranks of a step really learn from: id, crop box and flip, rank after rank."""
    return [
        (int(sample), tuple(request.draws.boxes[row].tolist()), bool(request.draws.flips[row]))
        for request in requests
        for row, sample in enumerate(request.ids[: request.real_rows])
    ]


@given(plans(), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_the_ranks_together_ask_for_what_one_rank_would(plan, world, data):
    """The same global batches, crop boxes and flips at any world size, from any restart point on."""
    first = data.draw(st.integers(0, plan.total_steps - 1))
    alone = requests_of(plan)[first:]
    ranks = [requests_of(plan, first, rank, world) for rank in range(world)]
    assert {len(requests) for requests in ranks} == {len(alone)}  # no rank waits for another at the end
    for number, whole in enumerate(alone):
        parts = [requests[number] for requests in ranks]
        own = own_rows(parts)
        assert sorted(own) == sorted(own_rows([whole]))
        for part in ("selected", "candidates"):
            listed = getattr(next(plan.steps(first + number)), part).tolist()
            assert [row[0] for row in own if row[0] in set(listed)] == listed
        assert len({request.rows for request in parts}) == 1
        for request in parts:
            assert request.fill_with_images
            assert request.real_rows <= request.rows
            assert len(request.ids) > 0  # a rank without work still has something to show


@given(plans(), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_ranks_of_an_epoch_ask_for_the_subset_once(plan, world):
    """Each id of S exactly once, each id of C at most once, nothing else."""
    ranks = [requests_of(plan, 0, rank, world) for rank in range(world)]
    steps = plan.steps_per_epoch
    for epoch in range(plan.epochs):
        of_epoch = [request for requests in ranks for request in requests[epoch * steps : (epoch + 1) * steps]]
        asked = [row[0] for row in own_rows(of_epoch)]
        assert len(set(asked)) == len(asked)
        assert set(asked) - set(plan.candidates.tolist()) == set(plan.selected.tolist())


def test_crops_and_flips_are_the_draws_of_the_sample_in_its_epoch():
    plan = StaticPlan(derive_stream(0, "x"), np.arange(60), 16, 3, np.arange(100, 130))
    requests = requests_of(plan)
    for number, request in enumerate(requests):
        widths, heights = INDEX.width[request.ids], INDEX.height[request.ids]
        boxes, flips = training_boxes(GEOMETRY, plan.stream, number // 4, request.ids, widths, heights)
        np.testing.assert_array_equal(request.draws.boxes, boxes)
        np.testing.assert_array_equal(request.draws.flips, flips)
    of_zero = {tuple(box) for request in requests for box in request.draws.boxes[request.ids == 0].tolist()}
    assert len(of_zero) == 3  # another crop in each epoch


def test_rows_of_the_selected_come_first_and_the_shape_is_fixed_within_an_epoch():
    plan = StaticPlan(derive_stream(0, "x"), np.arange(21), 8, 2, np.arange(100, 120), candidates_from=1)
    requests = requests_of(plan)
    assert [(len(request.ids), request.rows) for request in requests] == [
        (8, 8),
        (8, 8),
        (5, 8),
        (12, 12),
        (12, 12),
        (7, 12),
    ]
    for request in requests[3:]:
        from_candidates = request.ids >= 100
        assert from_candidates.tolist() == sorted(from_candidates.tolist())


def test_a_rank_without_a_row_shows_the_steps_rows():
    plan = StaticPlan(derive_stream(0, "x"), np.arange(6), 4, 1, np.empty(0, np.int64))
    whole, empty = requests_of(plan)[1], requests_of(plan, rank=0, world=4)[1]
    assert whole.ids.tolist() == empty.ids.tolist()  # two ids, dealt to ranks 1 and 3
    assert (whole.real_rows, empty.real_rows) == (2, 0)


def test_a_restart_asks_for_the_same():
    plan = StaticPlan(derive_stream(0, "x"), np.arange(50), 8, 3, np.arange(100, 120), candidates_from=1)
    for whole, resumed in zip(requests_of(plan)[9:], requests_of(plan, first=9), strict=True):
        for field in ("ids", "draws.boxes", "draws.flips"):
            np.testing.assert_array_equal(attrgetter(field)(whole), attrgetter(field)(resumed))


@pytest.mark.parametrize(("count", "batch", "rows"), [(23, 8, 8), (24, 8, 8), (5, 8, 5), (0, 8, None)])
def test_a_predict_pass_asks_for_each_id_once_in_storage_order(count, batch, rows):
    ids = np.arange(0, 2 * count, 2)
    requests = list(predict_requests(ids, batch, INDEX, GEOMETRY))
    stored = sorted(ids.tolist(), key=lambda sample: (INDEX.shard[sample], sample))
    assert [sample for request in requests for sample in request.ids] == stored
    assert all(request.rows == rows and not request.fill_with_images for request in requests)
    assert all(request.real_rows == len(request.ids) for request in requests)
    for request in requests:
        assert not request.draws.flips.any()
        np.testing.assert_array_equal(request.draws.boxes[:, 0], (INDEX.width[request.ids] - 8) // 2)
