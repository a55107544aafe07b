"""The windowed order: shards in random order, a few at a time, under the same contract as the shuffled one."""

import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.schema import OrderConfig
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.sample_order import Windows, build_windows, derive_stream, epoch_order, mix64, windowed_order

quick = settings(max_examples=60, deadline=None)
SHARD = int.from_bytes(hashlib.sha256(b"shard").digest()[:8], "little")


def shards_in_turn(stream, epoch, shards):
    """The shards in the order in which the epoch reads them, one number at a time."""
    return sorted(set(shards), key=lambda shard: int(mix64(stream, epoch, SHARD, int(shard))))


def by_hand(stream, epoch, ids, shards, window):
    """The definition, written out: window number of the shard, then hash of the id."""
    turn = {shard: place // window for place, shard in enumerate(shards_in_turn(stream, epoch, shards))}
    of = dict(zip(ids, shards, strict=True))
    return sorted(ids, key=lambda sample: (turn[of[sample]], int(mix64(stream, epoch, int(sample)))))


@pytest.mark.parametrize(
    ("epoch", "golden"),
    [
        (0, [9, 16, 8, 17, 7, 6, 0, 13, 5, 12, 1, 4, 18, 14, 3, 15, 19, 2, 11, 10]),
        (1, [0, 9, 1, 8, 14, 15, 19, 18, 7, 6, 17, 16, 5, 10, 4, 3, 11, 2, 12, 13]),
    ],
)
def test_golden_orders(epoch, golden):
    """Twenty samples in ten shards, three shards a window."""
    stream, ids = derive_stream(0, "standard"), np.arange(20)
    assert windowed_order(stream, epoch, ids, ids // 2, 3).tolist() == golden
    assert by_hand(stream, epoch, ids.tolist(), (ids // 2).tolist(), 3) == golden


@st.composite
def subsets(draw):
    """Any samples, each in any shard."""
    ids = np.array(draw(st.lists(st.integers(0, 500), min_size=1, max_size=90, unique=True)), np.int64)
    shards = np.array(draw(st.lists(st.integers(0, 30), min_size=len(ids), max_size=len(ids))), np.int32)
    return ids, shards


@given(subsets(), st.integers(0, 2**64 - 1), st.integers(0, 300), st.integers(1, 12), st.randoms())
@quick
def test_each_id_once_in_the_defined_order_however_the_ids_came(subset, stream, epoch, window, random):
    ids, shards = subset
    order = windowed_order(stream, epoch, ids, shards, window)
    assert order.tolist() == by_hand(stream, epoch, ids.tolist(), shards.tolist(), window)
    places = list(range(len(ids)))
    random.shuffle(places)
    assert windowed_order(stream, epoch, ids[places], shards[places], window).tolist() == order.tolist()


@given(subsets(), st.integers(0, 2**64 - 1), st.integers(1, 12))
@quick
def test_a_window_reads_at_most_so_many_shards_and_none_is_opened_twice(subset, stream, window):
    ids, shards = subset
    of = dict(zip(ids.tolist(), shards.tolist(), strict=True))
    met = [of[sample] for sample in windowed_order(stream, 0, ids, shards, window).tolist()]
    turn = shards_in_turn(stream, 0, shards.tolist())
    position = 0
    for first in range(0, len(turn), window):
        together = set(turn[first : first + window])
        count = sum(shard in together for shard in met)
        assert set(met[position : position + count]) == together
        position += count
    assert position == len(met)


@given(subsets(), st.integers(0, 2**64 - 1), st.integers(0, 5))
@quick
def test_a_window_of_all_shards_is_the_shuffled_order(subset, stream, epoch):
    ids, shards = subset
    assert windowed_order(stream, epoch, ids, shards, 31).tolist() == epoch_order(stream, epoch, ids).tolist()


@st.composite
def plans(draw):
    """S and C anywhere in shards of ten, a window never smaller than what a step can hold."""
    scattered = draw(st.permutations(range(300)))
    selected = draw(st.integers(1, 120))
    window = draw(st.integers(1, 10))
    return StaticPlan(
        stream=draw(st.integers(0, 2**64 - 1)),
        selected=np.array(scattered[:selected]),
        batch=draw(st.integers(1, 30)),
        epochs=2,
        candidates=np.array(scattered[selected : selected + draw(st.integers(0, 120))], np.int64),
        windows=Windows(np.arange(300) // 10, window),
    )


@given(plans())
@quick
def test_the_ids_of_a_step_are_neighbours_in_the_windowed_order(plan):
    """S and C alike: what a step takes of either is a run of its windowed order."""
    assert plan.windows is not None
    for epoch in range(plan.epochs):
        steps = [next(plan.steps(epoch * plan.steps_per_epoch + step)) for step in range(plan.steps_per_epoch)]
        for part in ("selected", "candidates"):
            ids = getattr(plan, part)
            order = windowed_order(plan.stream, epoch, ids, plan.windows.shards[ids], plan.windows.window)
            taken = np.concatenate([getattr(step, part) for step in steps])
            assert taken.tolist() == order[: len(taken)].tolist()
            assert part == "candidates" or len(taken) == len(order)


def test_a_step_touches_two_windows_at_most_where_windows_hold_a_step():
    shards = np.arange(4000) // 100
    plan = StaticPlan(3, np.arange(4000), 128, 1, windows=Windows(shards, 4))
    touched = [len(set(shards[step.selected].tolist())) for step in plan.steps()]
    assert max(touched) <= 8
    assert np.median(touched) == 4  # a shuffled step of 128 would touch nearly all 40
    shuffled = replace(plan, windows=None)
    assert min(len(set(shards[step.selected].tolist())) for step in list(shuffled.steps())[:-1]) > 30


def test_epochs_mix_other_shards_together():
    shards = np.arange(400) // 10
    plan = StaticPlan(3, np.arange(400), 40, 4, windows=Windows(shards, 4))
    firsts = {frozenset(shards[next(plan.steps(epoch * 10)).selected].tolist()) for epoch in range(4)}
    assert len(firsts) == 4


def test_the_recipe_says_which_order():
    shards = np.arange(5)
    assert build_windows(OrderConfig(), shards) is None
    windows = build_windows(OrderConfig(kind="windowed", window=3), shards)
    assert windows is not None
    assert (windows.window, windows.shards is shards) == (3, True)


def test_orders_of_a_web_sized_set_take_less_than_half_a_second():
    ids = np.arange(2_440_000)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        order = windowed_order(1, 0, ids, ids // 1000, 16)
        seconds.append(time.process_time() - began)
        assert len(order) == len(ids)
    assert min(seconds) < 0.5
