"""Orders: golden values against plain Python integers, exactly-once partition, the same at any world size."""

import hashlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.sample_order import (
    Windows,
    candidate_rows,
    derive_stream,
    draw_uniforms,
    epoch_order,
    mix64,
    slice_for_rank,
)

quick = settings(max_examples=50, deadline=None)
WORD = 2**64 - 1
NONE = np.empty(0, np.int64)


def scramble(value):
    """SplitMix64's finaliser, in Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def mixed(*words):
    state = 0
    for word in words:
        state = scramble(state ^ scramble(word & WORD))
    return state


def number_of(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


@pytest.mark.parametrize(
    ("words", "golden"),
    [
        ((0,), 0xA706DD2F4D197E6F),
        ((1,), 0x5E41AB087439611E),
        ((-1,), 0x5DC20AA7B2A27137),
        ((1, 2), 0xD97D4205FDAB0823),
        ((2, 1), 0x186A2DE8268E9286),
        ((2**63, 7, 0), 0xEC4F6529412ED424),
    ],
)
def test_golden_hashes(words, golden):
    assert int(mix64(*words)) == golden == mixed(*words)


@given(
    st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=4), st.lists(st.integers(0, 2**62), max_size=5)
)
@quick
def test_hashes_of_arrays_are_those_of_their_numbers(words, ids):
    hashed = mix64(*words, np.array(ids, np.int64))
    assert hashed.dtype == np.uint64
    assert hashed.tolist() == [mixed(*words, sample) for sample in ids]


@pytest.mark.parametrize(
    ("key", "golden"),
    [
        ((0, "standard"), 0x6E5396C3DF7FE023),
        ((0, "incv", 0, 0), 0xEF4AF4FDC0A31CE1),
        ((0, "incv", 0, 1), 0x3382C3B9D8F237D2),
        ((0, "incv", 1, 0), 0x3D5FA4D400EBD1E4),
        ((7, "coteaching_incv"), 0x2488A67EFEE88EDC),
    ],
)
def test_golden_streams(key, golden):
    seed, stage, *rest = key
    round_, fold = rest or (0, 0)
    assert derive_stream(*key) == golden == mixed(seed, number_of(stage), round_, fold)


@pytest.mark.parametrize(
    ("epoch", "golden"),
    [(0, [9, 11, 0, 5, 8, 10, 3, 7, 1, 2, 4, 6]), (1, [0, 7, 6, 5, 9, 10, 1, 4, 3, 11, 8, 2])],
)
def test_golden_orders(epoch, golden):
    stream = derive_stream(0, "standard")
    assert epoch_order(stream, epoch, np.arange(12)).tolist() == golden
    assert sorted(range(12), key=lambda sample: mixed(stream, epoch, sample)) == golden


@pytest.mark.parametrize(
    ("what", "golden"),
    [
        ("left", [0.29706873168960934, 0.15182407774287554, 0.8241824333760148]),
        ("flip", [0.18596976577266167, 0.9546311052233664, 0.5180590678612396]),
    ],
)
def test_golden_uniforms(what, golden):
    stream = derive_stream(0, "standard")
    assert draw_uniforms(stream, 3, np.array([0, 1, 5]), what).tolist() == golden
    assert [(mixed(stream, 3, number_of(what), sample) >> 11) / 2**53 for sample in (0, 1, 5)] == golden


def test_uniforms_fill_the_unit_interval():
    drawn = draw_uniforms(derive_stream(3, "x"), 0, np.arange(20_000), "left")
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 1000).max() < 150  # five standard deviations


id_sets = st.sets(st.integers(0, 10**9), min_size=1, max_size=80)


@given(id_sets, st.integers(0, WORD), st.integers(0, 300), st.randoms(use_true_random=False))
@quick
def test_an_order_is_a_permutation_whatever_order_the_ids_came_in(ids, stream, epoch, random):
    ids = list(ids)
    order = epoch_order(stream, epoch, np.array(ids, np.int64))
    random.shuffle(ids)
    again = epoch_order(stream, epoch, np.array(ids, np.int64))
    assert order.tolist() == again.tolist() == sorted(ids, key=lambda sample: (mixed(stream, epoch, sample), sample))


def test_every_part_of_the_key_changes_the_order():
    ids = np.arange(60)
    keys = [
        (seed, stage, round_, fold, epoch)
        for seed in (0, 1)
        for stage in ("incv", "standard")
        for round_ in (0, 1)
        for fold in (0, 1)
        for epoch in (0, 1, 2)
    ]
    orders = {tuple(epoch_order(derive_stream(*key[:4]), key[4], ids).tolist()) for key in keys}
    assert len(orders) == len(keys)


@given(st.integers(0, 60), st.integers(1, 17))
@quick
def test_dealt_parts_are_contiguous_disjoint_and_near_equal(count, world):
    ids = np.arange(count) * 3
    parts = [slice_for_rank(ids, rank, world) for rank in range(world)]
    assert np.concatenate(parts).tolist() == ids.tolist()
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@st.composite
def plans(draw):
    selected, candidates = draw(st.integers(1, 80)), draw(st.integers(0, 80))
    scattered = epoch_order(draw(st.integers(0, WORD)), 0, np.arange(selected + candidates)) * 7
    shards = np.arange(7 * (selected + candidates)) // draw(st.integers(1, 200))
    windows = st.builds(Windows, st.just(shards), st.integers(1, 8))
    return StaticPlan(
        stream=draw(st.integers(0, WORD)),
        selected=scattered[:selected],
        batch=draw(st.integers(1, 30)),
        epochs=draw(st.integers(1, 3)),
        candidates=scattered[selected:],
        candidates_from=draw(st.integers(0, 2)),
        windows=draw(st.none() | windows),
    )


@given(plans())
@quick
def test_an_epoch_deals_each_selected_id_once_and_each_candidate_at_most_once(plan):
    steps = list(plan.steps())
    selected, candidates = len(plan.selected), len(plan.candidates)
    per_epoch = -(-selected // plan.batch)
    assert (plan.steps_per_epoch, plan.total_steps, len(steps)) == (
        per_epoch,
        per_epoch * plan.epochs,
        plan.total_steps,
    )
    for epoch in range(plan.epochs):
        own = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert [step.epoch for step in own] == [epoch] * per_epoch
        dealt = np.concatenate([step.selected for step in own])
        assert sorted(dealt.tolist()) == sorted(plan.selected.tolist())
        assert all(len(step.selected) == plan.batch for step in own[:-1])
        drawn = np.concatenate([step.candidates for step in own]).tolist()
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(plan.candidates.tolist())
        share = min(Fraction(1, 2), Fraction(candidates, selected)) if epoch >= plan.candidates_from else 0
        assert [len(step.candidates) for step in own] == [int(len(step.selected) * share) for step in own]
        assert all(len(step.selected) + len(step.candidates) <= plan.schedule.rows for step in own)


@given(st.integers(0, 10**6), st.integers(1, 10**7), st.integers(0, 10**7))
@quick
def test_candidate_rows_is_an_exact_floor(rows, selected, candidates):
    share = min(Fraction(1, 2), Fraction(candidates, selected))
    assert candidate_rows(rows, selected, candidates) == int(rows * share)


def test_the_last_smaller_step_draws_by_its_own_size():
    plan = StaticPlan(1, np.arange(21), 8, 1, np.arange(100, 107))
    assert [(len(step.selected), len(step.candidates)) for step in plan.steps()] == [(8, 2), (8, 2), (5, 1)]


def test_candidates_are_drawn_afresh_in_each_epoch():
    plan = StaticPlan(1, np.arange(40), 8, 2, np.arange(100, 120))
    first, second = (plan.plan_epoch(epoch).parts[1].ids for epoch in (0, 1))
    assert [len(set(drawn.tolist())) for drawn in (first, second)] == [20, 20]
    assert first.tolist() != second.tolist()
    warm = StaticPlan(1, np.arange(40), 8, 3, np.arange(100, 120), candidates_from=2)
    assert [len(step.candidates) for step in warm.steps()] == [0] * 10 + [4] * 5
    assert [[part.rows for part in epoch.parts] for epoch in warm.plans()] == [[8], [8], [8, 4]]


@given(plans(), st.data())
@quick
def test_a_step_is_the_same_from_wherever_one_starts(plan, data):
    steps = list(plan.steps())
    number = data.draw(st.integers(0, plan.total_steps - 1))
    fresh = replace(plan, selected=plan.selected[::-1].copy())
    for other in (next(plan.steps(number)), next(fresh.steps(number))):
        assert (other.step, other.epoch) == (number, steps[number].epoch)
        assert other.selected.tolist() == steps[number].selected.tolist()
        assert other.candidates.tolist() == steps[number].candidates.tolist()
    assert len(list(plan.steps(number))) == plan.total_steps - number


def test_a_training_without_candidates():
    plan = StaticPlan(1, np.arange(10), 4, 2, NONE)
    assert [len(step.candidates) for step in plan.steps()] == [0] * 6
    assert [len(epoch.parts) for epoch in plan.plans()] == [1, 1]
