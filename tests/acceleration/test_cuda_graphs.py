"""Requirements of CUDA graph capture, on any machine: fixed shapes, no host-device sync, no side effects."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fast_steps import EMPTY, KINDS, POISONED, SHORT, batch_at, furthest, position, task_of, told
from trainer.acceleration.compile import iterate_blocks
from trainer.acceleration.cuda_graphs import run_eagerly
from trainer.distributed.world import SINGLE_PROCESS
from trainer.models.factory import create_model

every_kind = pytest.mark.parametrize("kind", KINDS)
CPU = SINGLE_PROCESS.device
aten = torch.ops.aten


def shapes_at(task, step):
    inputs, fixed = task.inputs(batch_at(step, CPU), position(step))
    return {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}, fixed


@pytest.mark.parametrize("kind", ["standard", "one_pass"])
def test_shapes_change_only_when_rows_of_c_come(kind):
    """Whatever n(e), the rate, the last batch's length, and what could be read."""
    task = task_of(kind, SINGLE_PROCESS)
    first, later = shapes_at(task, 0), shapes_at(task, 25)
    assert all(shapes_at(task, step) == first for step in range(25))
    assert all(shapes_at(task, step) == later for step in range(25, 50))
    assert first != later
    assert {EMPTY, POISONED, SHORT} < set(range(25))


def test_the_second_forward_of_eval_first_has_one_shape_an_epoch():
    task = task_of("eval_first", SINGLE_PROCESS)
    assert [shapes_at(task, 5 * epoch)[1] for epoch in range(8)] == [
        (32,),
        (29,),
        (27,),
        (24,),
        (21,),
        (19,),
        (16,),
        (16,),
    ]
    assert shapes_at(task, SHORT)[1] == shapes_at(task, SHORT - 1)[1]


@every_kind
def test_a_rehearsal_leaves_no_trace(kind):
    task = task_of(kind, SINGLE_PROCESS, "adam")
    told(task, range(3))
    before, draws = copy.deepcopy(task.state()), torch.get_rng_state()
    with task.without_effects():
        for step in (3, POISONED, EMPTY):
            torch.rand(5)
            run_eagerly(task.compute_step(*task.inputs(batch_at(step, CPU), position(step))), SINGLE_PROCESS)
    after = task.state()
    assert after.values == before.values
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert torch.equal(draws, torch.get_rng_state())
    task.step(batch_at(3, CPU), position(3))
    changed = task.state().tensors
    assert not all(torch.equal(tensor, changed[name]) for name, tensor in before.tensors.items())


class Watch(TorchDispatchMode):
    """Counts operations that sync with the host on a GPU."""

    LOOKS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default)
    BY_MASK = (aten.index.Tensor, aten.index_put_.default)

    def __init__(self):
        super().__init__()
        self.looks = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func in self.BY_MASK and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.looks += func in self.LOOKS or by_mask
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_who_looks():
    mask = torch.tensor([True, False])
    for look in (lambda: bool(mask.any()), lambda: mask.sum().item(), lambda: torch.arange(2)[mask]):
        with Watch() as watch:
            look()
        assert watch.looks == 1


@every_kind
def test_a_step_looks_at_one_number_alone(kind):
    """Whether to make the update; on a GPU the fused optimiser decides that on the device."""
    task = task_of(kind, SINGLE_PROCESS, "sgd")
    for step in (0, POISONED, SHORT, 30):
        batch = batch_at(step, CPU)
        with Watch() as watch:
            task.step(batch, position(step))
        assert watch.looks == 1


@every_kind
def test_loading_goes_into_the_tensors_that_are_there(kind):
    """A captured graph has their addresses."""
    task = task_of(kind, SINGLE_PROCESS, "adam")
    told(task, range(4))
    saved = copy.deepcopy(task.state())
    places = {name: tensor.data_ptr() for name, tensor in task.state().tensors.items()}
    expected = told(task, range(4, 8))
    task.load(saved)
    assert {name: tensor.data_ptr() for name, tensor in task.state().tensors.items()} == places
    again = told(task, range(4, 8))
    assert furthest(again, expected) == 0.0
    assert again.chosen == expected.chosen


@pytest.mark.parametrize(("name", "kinds"), [("inception_resnet_v2", 9), ("cifar_resnet32", 4)])
def test_every_weight_is_in_one_block(name, kinds):
    network = create_model(name, 10, 0)
    blocks = list(iterate_blocks(network))
    weights = [id(parameter) for block in blocks for parameter in block.parameters()]
    assert sorted(weights) == sorted(id(parameter) for parameter in network.parameters())
    assert len({type(block) for block in blocks}) <= kinds
