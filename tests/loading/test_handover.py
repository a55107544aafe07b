"""Several threads make the batches, one consumer gets them in order."""

import threading
import time
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.loading.batch import Batch
from trainer.loading.handover import Dealt, Feeder

CPU = torch.device("cpu")


def numbered(number: int) -> Batch:
    whole = torch.full((2,), number)
    return Batch(ids=whole, images=torch.full((2, 3, 4, 4), float(number)), labels=whole, weights=torch.ones(2))


def numbers_of(batches):
    return [int(batch.ids[0]) for batch in batches]


def feeding_threads():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


@given(count=st.integers(0, 30), lines=st.integers(1, 4), data=st.data())
def test_every_line_is_dealt_its_own_whoever_asks_first(count, lines, data):
    dealt = Dealt(range(count), lines)
    hands, got = [dealt.to(line) for line in range(lines)], [[] for _ in range(lines)]
    still = set(range(lines))
    while still:
        line = data.draw(st.sampled_from(sorted(still)))
        number = next(hands[line], None)
        if number is None:
            still.remove(line)
        else:
            got[line].append(number)
    assert got == [list(range(line, count, lines)) for line in range(lines)]


def test_no_more_is_taken_than_the_turns_before_it_need():
    taken = []

    def requests():
        for number in range(100):
            taken.append(number)
            yield number

    dealt = Dealt(requests(), 3)
    second = dealt.to(1)
    assert [next(second), next(second)] == [1, 4]
    assert taken == [0, 1, 2, 3, 4]


def test_an_error_of_the_requests_reaches_every_line():
    def requests():
        yield 0
        yield 1
        raise OSError("the list ends here")

    dealt = Dealt(requests(), 2)
    for line in range(2):
        hand = dealt.to(line)
        assert next(hand) == line
        with pytest.raises(OSError, match="ends here"):
            next(hand)


@given(count=st.integers(0, 25), lines=st.integers(1, 4), slow=st.integers(0, 3))
def test_batches_come_in_order_however_long_each_takes(count, lines, slow):
    dealt = Dealt(range(count), lines)

    def line(number):
        for request in dealt.to(number):
            time.sleep(0.001 if number == slow else 0)
            yield numbered(request)

    feeder = Feeder([line(number) for number in range(lines)], CPU)
    try:
        assert numbers_of(feeder) == list(range(count))
    finally:
        feeder.close()
    assert feeding_threads() == []


@pytest.mark.parametrize("lines", [1, 2, 3])
def test_an_error_comes_after_the_batches_before_it(lines):
    dealt = Dealt(range(20), lines)

    def line(number):
        for request in dealt.to(number):
            if request == 7:
                raise OSError("no such image")
            yield numbered(request)

    feeder = Feeder([line(number) for number in range(lines)], CPU)
    batches = iter(feeder)
    assert numbers_of(islice(batches, 7)) == list(range(7))
    with pytest.raises(OSError, match="no such image"):
        next(batches)
    feeder.close()
    assert feeding_threads() == []


def test_closed_early_it_takes_few_and_lets_its_lines_go():
    ended, dealt = [], Dealt(range(1000), 2)

    def line(number):
        try:
            for request in dealt.to(number):
                yield numbered(request)
        finally:
            ended.append(number)

    feeder = Feeder([line(0), line(1)], CPU)
    batches = iter(feeder)
    assert int(next(batches).ids[0]) == 0
    feeder.close()
    assert sorted(ended) == [0, 1]
    assert feeding_threads() == []
    assert next(dealt.to(0)) < 10
