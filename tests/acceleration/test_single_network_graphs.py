"""Steps of F-correction and D2L meet the requirements of CUDA graph capture, on any machine."""

import copy

import pytest
import torch

from tests.acceleration.test_cuda_graphs import Watch
from tests.support.fast_steps import EMPTY, POISONED, SHORT, batch_at, furthest, position
from tests.support.single_network_steps import KINDS, task_of, told_by_epochs
from trainer.acceleration.cuda_graphs import run_eagerly
from trainer.distributed.world import SINGLE_PROCESS

every_kind = pytest.mark.parametrize("kind", KINDS)
CPU = SINGLE_PROCESS.device
EPOCHS = range(10)


@every_kind
def test_shapes_stay_while_the_batch_does(kind):
    task = task_of(kind, SINGLE_PROCESS)

    def shapes(step):
        inputs, fixed = task.inputs(batch_at(step, CPU), position(step))
        return {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}, fixed

    assert all(shapes(step) == shapes(0) for step in (1, EMPTY, POISONED, SHORT))


@every_kind
def test_a_step_looks_at_one_number_alone(kind):
    """Whether to make the update; on a GPU the fused optimiser decides that on the device."""
    task = task_of(kind, SINGLE_PROCESS)
    for step in (0, POISONED, SHORT):
        batch = batch_at(step, CPU)
        with Watch() as watch:
            task.step(batch, position(step))
        assert watch.looks == 1


@every_kind
def test_a_rehearsal_leaves_no_trace(kind):
    task = task_of(kind, SINGLE_PROCESS, "adam")
    told_by_epochs(task, range(1))
    before = copy.deepcopy(task.state())
    with task.without_effects():
        for step in (6, POISONED, EMPTY):
            run_eagerly(task.compute_step(*task.inputs(batch_at(step, CPU), position(step))), SINGLE_PROCESS)
    after = task.state()
    assert after.values == before.values
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_a_new_share_and_old_weights_come_in_the_tensors_that_are_there():
    """A captured graph has their addresses; the share of the labels is an input."""
    task = task_of("d2l", SINGLE_PROCESS)
    told_by_epochs(task, range(4))
    addresses = {name: tensor.data_ptr() for name, tensor in task.module.state_dict().items()}
    share = task.inputs(batch_at(0, CPU), position(0))[0]["alpha"]
    assert share.item() == 1.0
    told_by_epochs(task, range(4, 5))
    assert task.history.turned_after == 5
    assert {name: tensor.data_ptr() for name, tensor in task.module.state_dict().items()} == addresses
    after = task.inputs(batch_at(25, CPU), position(25))[0]["alpha"]
    assert after.data_ptr() == share.data_ptr()
    assert after.item() == pytest.approx(task.history.alpha)
    assert task.history.alpha < 1


def test_the_story_of_d2l_differs_from_that_of_a_training_that_does_not_turn():
    """Or the GPU tests could not tell whether a replayed step has the new share."""
    turning, steady = task_of("d2l", SINGLE_PROCESS), task_of("d2l", SINGLE_PROCESS)
    steady._measure = lambda features, epoch: 5.0
    ours, theirs = told_by_epochs(turning, EPOCHS), told_by_epochs(steady, EPOCHS)
    for one, other in zip(ours.values[:25], theirs.values[:25], strict=True):
        assert one == pytest.approx(other, nan_ok=True)
    assert furthest(ours, theirs) > 1e-3
