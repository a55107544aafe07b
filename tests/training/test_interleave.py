"""Trainings side by side in one process: each as if alone, stopped together, cleaned up after an error."""

import logging

import numpy as np
import pytest
import torch

from trainer.distributed.stop import Stopped
from trainer.records.logs import current_target, log_to_file
from trainer.training.interleave import interleave, run_to_end

CPU = torch.device("cpu")


def together(trainings, at_once=None, steps_per_turn=1):
    return run_to_end(interleave(trainings, CPU, at_once, steps_per_turn))


def drawing(seed, steps, seen, closed, stop_after=None):
    """A training that draws a random number a step."""
    try:
        torch.manual_seed(seed)
        drawn = []
        for step in range(steps):
            drawn.append(float(torch.rand(())))
            seen.append((seed, step))
            if stop_after is not None and len(seen) >= stop_after:
                raise Stopped(f"training {seed}", step, "asked to")
            yield
        return drawn
    finally:
        closed.append(seed)


@pytest.mark.parametrize("steps_per_turn", [1, 2, 4])
def test_each_draws_as_if_it_were_alone(steps_per_turn):
    alone = [run_to_end(drawing(seed, steps, [], [])) for seed, steps in ((1, 5), (2, 3), (3, 7))]
    torch.manual_seed(99)
    before, seen = torch.get_rng_state(), []
    runs = [drawing(seed, steps, seen, []) for seed, steps in ((1, 5), (2, 3), (3, 7))]
    results = together(runs, steps_per_turn=steps_per_turn)
    assert results == alone
    assert torch.equal(before, torch.get_rng_state())
    turns = {1: [(1, 0), (2, 0), (3, 0), (1, 1)], 2: [(1, 0), (1, 1), (2, 0), (2, 1)]}
    assert seen[:4] == turns.get(steps_per_turn, [(1, 0), (1, 1), (1, 2), (1, 3)])


def test_a_stop_lets_every_training_save_before_it_is_raised():
    seen, closed = [], []
    with pytest.raises(Stopped, match="training 1"):
        together([drawing(seed, 10, seen, closed, stop_after=5) for seed in (1, 2)])
    assert sorted(closed) == [1, 2]
    assert len(seen) == 6  # the first had its fifth turn, saw the wish, and so did the second


def failing():
    yield
    raise ValueError("broken")


def test_an_error_of_one_closes_all():
    closed = []
    with pytest.raises(ValueError, match="broken"):
        together([drawing(1, 10, [], closed), failing(), drawing(2, 10, [], closed)])
    assert sorted(closed) == [1, 2]


def test_numpy_results_come_back_in_order():
    def made(number):
        yield
        return np.full(2, number)

    assert [int(result[0]) for result in together([made(3), made(1)])] == [3, 1]


def test_no_more_than_asked_are_under_way_together():
    seen = []
    together([drawing(seed, 3, seen, []) for seed in (1, 2, 3)], at_once=2)
    assert [seed for seed, _ in seen] == [1, 2, 1, 2, 1, 2, 3, 3, 3]


def logging_run(folder, number):
    """It has a log file of its own, as a run has."""
    with log_to_file(folder / f"{number}.log", rank=0, size=1):
        for step in range(3):
            logging.getLogger("trainer").info("%d.%d", number, step)
            yield


def test_each_keeps_its_own_log(tmp_path):
    before = current_target()
    together([logging_run(tmp_path, number) for number in (1, 2)])
    for number in (1, 2):
        lines = (tmp_path / f"{number}.log").read_text().splitlines()[1:]
        assert [line.split()[-1] for line in lines] == [f"{number}.{step}" for step in range(3)]
    assert current_target() == before
