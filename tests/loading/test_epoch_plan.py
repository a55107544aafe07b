"""Plans of single epochs: repeated ids, several looks, what a plan promises, and how ranks share its rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loading.test_requests import GEOMETRY, INDEX
from trainer.loading.augment import centre_boxes, training_boxes
from trainer.loading.epoch_plan import EpochPlan, Mixing, Part, PlanError, Schedule, StaticPlan, require_plan
from trainer.loading.requests import training_requests
from trainer.loading.sample_order import draw_uniforms

STREAM = 11
SCHEDULE = Schedule(STREAM, 4, 3, 12, np.arange(50))
CUT = replace(GEOMETRY, cutout=4)


def rows_of(plan, rank=0, world=1, schedule=SCHEDULE, geometry=CUT):
    """What the steps of a plan show, step by step: (id, box, flip, hole) of each real row, in order."""
    found = []
    for request in training_requests(schedule, [plan], INDEX, geometry, 0, rank, world):
        draws = request.draws
        drawn = zip(request.ids, draws.boxes, draws.flips, draws.holes, strict=True)
        rows = [(int(sample), *box.tolist(), bool(flip), *hole.tolist()) for sample, box, flip, hole in drawn]
        found.append(rows[: request.real_rows])
    return found


@given(st.lists(st.integers(0, 49), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_no_two_rows_of_an_epoch_show_the_same_view_of_a_sample(ids, rows, looks):
    part = Part(np.array(ids), rows, ("train",) * looks)
    plan = EpochPlan(0, (part,))
    views = [
        (int(sample), int(view))
        for position in range(-(-len(ids) // rows))
        for look in range(looks)
        for sample, view in zip(
            part.at(position), np.broadcast_to(plan.views(0, position, look), part.at(position).shape), strict=True
        )
    ]
    assert len(set(views)) == len(views) == looks * len(ids)
    most = max(ids.count(sample) for sample in ids)
    assert {view for _, view in views} == set(range(looks * most))


def test_views_differ_across_parts():
    plan = EpochPlan(0, (Part(np.array([3, 5, 3]), 2, ("weak",)), Part(np.array([5, 3, 7]), 2, ("train", "train"))))
    assert [plan.views(0, position, 0).tolist() for position in range(2)] == [[0, 0], [1]]
    assert [plan.views(1, 0, look).tolist() for look in range(2)] == [[1, 2], [2, 3]]
    assert plan.views(1, 1, 1).tolist() == [1]
    alone = EpochPlan(0, (Part(np.array([3, 5]), 2, may_repeat=False), Part(np.array([7]), 1, may_repeat=False)))
    assert alone.views(1, 0, 0) == 0


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30, unique=True), st.data())
@settings(max_examples=60, deadline=None)
def test_a_view_is_drawn_for_itself_and_view_0_as_ever(ids, data):
    every = np.array(ids)
    views = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids))))
    drawn = draw_uniforms(STREAM, 5, every, "flip", views)
    for view in range(4):
        alone = draw_uniforms(STREAM, 5, every[views == view], "flip", view)
        np.testing.assert_array_equal(drawn[views == view], alone)
    np.testing.assert_array_equal(draw_uniforms(STREAM, 5, every, "flip"), draw_uniforms(STREAM, 5, every, "flip", 0))
    assert not np.intersect1d(*(draw_uniforms(STREAM, 5, every, "flip", view) for view in (0, 1))).size


@given(
    st.lists(st.integers(0, 49), min_size=17, max_size=24), st.integers(2, 5), st.sampled_from([None, Mixing(0.4)])
)
@settings(max_examples=40, deadline=None)
def test_the_ranks_share_the_rows_of_every_look(ids, world, mixed):
    mixing = Mixing(0.4) if mixed else None
    plan = EpochPlan(1, (Part(np.array(ids), 8, ("train", "weak", "centre")), Part(np.arange(5), 2)), mixing)
    alone = rows_of(plan)
    ranks = [rows_of(plan, rank, world) for rank in range(world)]
    for number, whole in enumerate(alone):
        assert sorted(row for rank in ranks for row in rank[number]) == sorted(whole)


def test_looks_say_what_is_drawn():
    ids = np.arange(24)
    (first, *_) = rows_of(EpochPlan(1, (Part(ids, 8, ("train", "weak", "centre")),)))
    shown = ids[:8]
    widths, heights = INDEX.width[shown], INDEX.height[shown]
    for view, (rows, hole_in) in enumerate([(first[:8], True), (first[8:16], False)]):
        boxes, flips = training_boxes(CUT, STREAM, 1, shown, widths, heights, view)
        assert [row[1:6] for row in rows] == [(*box, flip) for box, flip in zip(boxes.tolist(), flips, strict=True)]
        assert all((row[6:] != (0, 0, 0, 0)) == hole_in for row in rows)
    centred = centre_boxes(CUT, widths, heights).tolist()
    assert [row[1:6] for row in first[16:]] == [(*box, False) for box in centred]


GOOD = EpochPlan(2, (Part(np.arange(24) % 10, 8),))


def test_a_plan_that_keeps_its_promises_passes():
    require_plan(GOOD, SCHEDULE, 2)
    require_plan(replace(GOOD, parts=(*GOOD.parts, Part(np.arange(3), 4))), SCHEDULE, 2)
    plan = StaticPlan(STREAM, np.arange(30), 7, 3, np.arange(40, 60), candidates_from=1)
    for epoch, each in enumerate(plan.plans()):
        require_plan(each, plan.schedule, epoch)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((Part(np.arange(25), 8),), "has ids for 4 steps|have ids for 4 steps"),
        ((Part(np.arange(16), 8),), "have ids for 2 steps"),
        ((Part(np.arange(24), 8), Part(np.arange(20), 4)), "3 and 5 steps"),
        ((Part(np.array([0] * 23 + [50]), 8),), "sample_id 50"),
        ((Part(np.array([0] * 23 + [-1]), 8),), "sample_id -1"),
        ((Part(np.arange(24), 8, ()),), "one look"),
        ((), "needs parts"),
        ((Part(np.arange(24), 8, ("train", "weak")),), "16 rows a step"),
        ((Part(np.arange(24) % 9, 8, may_repeat=False),), "repeats ids"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_refused(parts, told):
    with pytest.raises(PlanError, match=told):
        require_plan(EpochPlan(2, parts), SCHEDULE, 2)
    with pytest.raises(PlanError, match="is of epoch 3"):
        require_plan(EpochPlan(2, parts), SCHEDULE, 1)


def test_the_digest_tells_plans_apart():
    (part,) = GOOD.parts
    others = [
        replace(GOOD, epoch=1),
        replace(GOOD, mixing=Mixing(0.1)),
        replace(GOOD, mixing=Mixing(0.1, "cutmix")),
        replace(GOOD, parts=(part, part)),
        replace(GOOD, parts=(replace(part, looks=("weak",)),)),
        replace(GOOD, parts=(replace(part, rows=12),)),
        replace(GOOD, parts=(replace(part, may_repeat=False),)),
        replace(GOOD, parts=(replace(part, ids=part.ids[::-1].copy()),)),
    ]
    digests = {plan.digest() for plan in (GOOD, *others)}
    assert len(digests) == len(others) + 1
    assert replace(GOOD, parts=(replace(part, ids=part.ids.copy()),)).digest() == GOOD.digest()
