"""Replayed steps of F-correction and D2L equal the eager ones. `make test-gpu` runs these on a GPU."""

import copy

import pytest
import torch

from tests.support.fast_steps import furthest, step_without_waiting
from tests.support.single_network_steps import KINDS, task_of, told_by_epochs
from trainer.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
EPOCHS = range(10)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_replayed_steps_are_the_eager_ones(kind, optimizer):
    """Ten epochs with a warm-up, a milestone, lost rows, NaN, rows of C, and D2L's turning point."""
    eager = told_by_epochs(task_of(kind, WORLD, optimizer), EPOCHS)
    replayed = told_by_epochs(task_of(kind, WORLD, optimizer, graphs=True), EPOCHS)
    assert replayed.counts == eager.counts
    for ours, theirs in zip(replayed.values, eager.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)


@every_kind
@pytest.mark.parametrize("stop", [4, 5, 7])
def test_saved_loaded_and_continued_after_the_recording(kind, stop):
    """Before, at and after the turning point; into the recorded task, which has gone on, and into a new one."""
    uninterrupted = told_by_epochs(task_of(kind, WORLD, graphs=True), EPOCHS)
    task = task_of(kind, WORLD, graphs=True)
    told_by_epochs(task, range(stop))
    saved = copy.deepcopy(task.state())
    told_by_epochs(task, range(stop, stop + 2))
    new = task_of(kind, WORLD, graphs=True)
    for each in (task, new):
        each.load(copy.deepcopy(saved))
        assert furthest(told_by_epochs(each, range(stop, len(EPOCHS))), uninterrupted) == 0.0


@every_kind
@pytest.mark.parametrize("graphs", [True, False])
def test_steps_wait_for_nothing(kind, graphs):
    step_without_waiting(task_of(kind, WORLD, graphs=graphs, precision="bf16"), range(30, 41))


@every_kind
def test_bf16_and_compiled_blocks_stay_close(kind):
    eager = told_by_epochs(task_of(kind, WORLD, precision="bf16"), range(2), torch.bfloat16)
    fast = told_by_epochs(task_of(kind, WORLD, graphs=True, compile=True, precision="bf16"), range(2), torch.bfloat16)
    for ours, theirs in zip(fast.values, eager.values, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.03)
