"""How a process sets up its GPUs; tests that need a GPU are in test_streams_gpu.py."""

import gc
import os
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from trainer.acceleration.streams import ExclusiveStream
from trainer.config.schema import ExecutionConfig
from trainer.distributed.devices import count_visible_gpus
from trainer.distributed.process_group import select_device

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
GPU = torch.device("cuda", 0)
STREAMS = 32
"""That torch hands out in turn."""


@pytest.fixture
def asked(monkeypatch):
    """What CUDA would have read of its settings when it was asked the first time."""
    found = []

    def is_available():
        found.append(os.environ.get(QUEUES))
        return False

    monkeypatch.delenv(QUEUES, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    yield found
    os.environ.pop(QUEUES, None)


def test_cuda_is_told_of_its_queues_before_it_is_asked_anything(asked):
    assert count_visible_gpus() == 0
    assert asked == ["32"]


def test_a_user_may_have_another_number(asked, monkeypatch):
    monkeypatch.setenv(QUEUES, "1")
    select_device(ExecutionConfig(device="auto"))
    assert asked == ["1"]


def test_on_the_cpu_it_is_not_asked_at_all(asked):
    assert select_device(ExecutionConfig(device="cpu")).type == "cpu"
    assert asked == []


class Stream:
    """One of the few that torch has, a new object every time. Nothing may point to it weakly, as in older torch."""

    __slots__ = ("number",)
    numbers = cycle(range(STREAMS))

    def __init__(self, device, priority):
        self.number = next(self.numbers)

    def __eq__(self, other):
        return self.number == other.number

    def __hash__(self):
        return hash(self.number)


@given(st.lists(st.integers(0, STREAMS - 1), max_size=200))
def test_no_two_living_ones_are_the_same(order):
    """order: of every number, whether it is the turn to make a stream for it or to let it go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        living = {}
        for place in order:
            if place in living:
                del living[place]
            else:
                living[place] = ExclusiveStream(GPU)
            assert len({own.stream for own in living.values()}) == len(living)


def test_beyond_the_last_one_there_are_no_more(monkeypatch):
    """Two graphs of one stream, replayed side by side, would write into each other's scratch memory."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    living = [ExclusiveStream(GPU) for _ in range(STREAMS)]
    with pytest.raises(ConfigError, match="--at-once"):
        ExclusiveStream(GPU)
    del living[5]
    ExclusiveStream(GPU)


def test_what_only_the_collector_finds_is_found_in_time(monkeypatch):
    """A training that is over may hang in a circle of references."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    gc.disable()
    try:
        for _ in range(3 * STREAMS):
            circle = [ExclusiveStream(GPU)]
            circle.append(circle)
    finally:
        gc.enable()
