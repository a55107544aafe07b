"""Rates and times left of a training job, by a clock that the tests turn."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.records.pace import TIMES, Later, Pace, describe_pace, estimate_left, remove_times


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batches(clock: Clock, wait: float) -> Iterator[int]:
    number = 0
    while True:
        clock.now += wait
        yield number
        number += 1


def run_steps(pace: Pace, clock: Clock, arriving: Iterator[int], steps: int, seconds: float, images: int) -> None:
    for _ in range(steps):
        next(arriving)
        clock.now += seconds
        pace.end_step(images)


def test_rates_and_times_left() -> None:
    clock = Clock()
    pace = Pace(100, Later(in_stage=3, in_later_stages=2), clock=clock)
    arriving = pace.time_waits(batches(clock, 0.25))
    clock.now += 60  # compiling
    run_steps(pace, clock, arriving, 1, 60.0, 32)
    assert pace.measure(1) == {}
    run_steps(pace, clock, arriving, 9, 0.75, 32)
    times = pace.measure(10)
    assert tuple(times) == TIMES
    assert times == pytest.approx(
        {"images_per_s": 32, "data_wait": 0.25, "left_s": 90, "stage_left_s": 390, "run_left_s": 590}
    )
    with pace.aside():
        clock.now += 10.0  # an evaluation: not part of the rates
    run_steps(pace, clock, arriving, 10, 0.75, 64)
    after = pace.measure(20)
    assert (after["images_per_s"], after["data_wait"]) == (64.0, 0.25)
    assert after["left_s"] == pytest.approx(80 * (9 + 10 + 10) / 19, rel=1e-3)


def test_waits_end_with_the_batches() -> None:
    assert list(Pace(3).time_waits(iter([1, 2, 3]))) == [1, 2, 3]


@given(st.floats(0, 1e3), st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 100), st.floats(0, 100))
def test_the_end_of_the_run_is_never_before_that_of_its_parts(
    per_step: float, done: int, more: int, stage: float, run: float
) -> None:
    job, of_stage, of_run = estimate_left(per_step, done, done + more, Later(stage, run))
    assert 0 <= job <= of_stage <= of_run
    if more == stage == run == 0:
        assert of_run == 0


def test_words_and_lines() -> None:
    times = dict(zip(TIMES, (1234.5, 0.043, 6.0, 70.0, 3723.0), strict=True))
    words = describe_pace(times, 5.43, 12)
    assert words == "epoch 5.4/12, 1,234 images/s, data wait 4 %, left: stage 01:10, run 1:02:03"
    assert describe_pace({}, 0.1, 12) == "epoch 0.1/12"
    assert remove_times({"step": 3, **times, "loss": 1.0}) == {"step": 3, "loss": 1.0}
