"""A producer thread prefetches batches; the consumer gets them in order."""

import threading
import time
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.loading.batch import Batch
from trainer.loading.prefetch import PrefetchThread

CPU = torch.device("cpu")


def numbered(number: int) -> Batch:
    whole = torch.full((2,), number)
    return Batch(ids=whole, images=torch.full((2, 3, 4, 4), float(number)), weights=torch.ones(2))


def numbers_of(batches):
    return [int(batch.ids[0]) for batch in batches]


def feeding_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@given(count=st.integers(0, 25), making=st.sampled_from([0, 0.001]), using=st.sampled_from([0, 0.001]))
def test_batches_come_in_order_whoever_is_slower(count, making, using):
    def batches():
        for number in range(count):
            time.sleep(making)
            yield numbered(number)

    feeder, got = PrefetchThread(batches(), CPU), []
    try:
        for batch in feeder:
            time.sleep(using)
            got += numbers_of([batch])
    finally:
        feeder.close()
    assert got == list(range(count))
    assert feeding_threads() == []


def test_an_error_comes_after_the_batches_before_it():
    def batches():
        yield from map(numbered, range(7))
        raise OSError("no such image")

    feeder = PrefetchThread(batches(), CPU)
    fed = iter(feeder)
    assert numbers_of(islice(fed, 7)) == list(range(7))
    with pytest.raises(OSError, match="no such image"):
        next(fed)
    feeder.close()
    assert feeding_threads() == []


def test_closed_early_it_has_taken_few_and_lets_them_go():
    taken, ended = [], []

    def batches():
        try:
            for number in range(1000):
                taken.append(number)
                yield numbered(number)
        finally:
            ended.append(True)

    feeder = PrefetchThread(batches(), CPU)
    assert int(next(iter(feeder)).ids[0]) == 0
    feeder.close()
    assert ended == [True]
    assert feeding_threads() == []
    assert len(taken) < 10
