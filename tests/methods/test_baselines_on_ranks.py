"""The paper's baselines on two ranks do what one process does: counts and percentiles are global."""

import pytest

from tests.support.fast_steps import MEASURES, batch_at, position, task_of
from tests.support.graph_ranks import assert_same_values, furthest, told_by
from tests.support.graph_ranks_program import trained
from trainer.distributed.world import SINGLE_PROCESS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return told_by(2, tmp_path_factory.mktemp("ranks"), tuple(MEASURES))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", MEASURES)
def test_two_ranks_do_what_one_process_does(kind, ranks):
    """With an empty batch, one with NaN, a short one and unreadable rows, which are on one rank only."""
    alone = trained(kind, SINGLE_PROCESS, graphs=False)
    one, other = (told[f"{kind} eager"] for told in ranks)
    assert furthest(one["last"], other["last"]) == 0.0
    assert_same_values(one, other, rel=0.0)
    assert one["guard"] == alone["guard"] == {"skipped": 1, "in_a_row": 0}
    assert furthest(one["last"], alone["last"]) < 1e-4
    assert_same_values(one, alone, rel=1e-4)
    assert furthest(alone["last"], alone["first"]) > 0.01  # it did learn
    assert len({values[MEASURES[kind]] for values in alone["values"]}) > 10


@pytest.mark.parametrize("kind", MEASURES)
def test_the_tasks_that_gpus_replay_run_eagerly(kind):
    task = task_of(kind, SINGLE_PROCESS)
    values = task.step(batch_at(0, task.device), position(0))
    assert all(value.isfinite() for value in values.values())
