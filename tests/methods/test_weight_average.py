"""The moving average of weights: by hand, over skipped steps, saved and loaded, and used for every prediction."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from shards.errors import DataError
from tests.support.fast_steps import KINDS, POISONED, batch_at, position, task_of
from tests.support.toy_networks import assert_same_network, batch_of, linear, normed, setting, step_at
from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.folds import FoldTask
from trainer.methods.standard import StandardTask
from trainer.methods.weight_average import WeightAverage, decay_at, load_averages
from trainer.models.twin import TwinModel
from trainer.training.checkpoint import load_module

DECAY = 0.9
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
YES, NO = torch.tensor(True), torch.tensor(False)


@unhurried
@given(st.integers(0, 10**6), st.floats(0.01, 0.9999))
def test_the_decay_grows_to_its_final_value(step: int, decay: float) -> None:
    assert 0 < decay_at(step, decay) <= decay
    assert decay_at(step, decay) <= decay_at(step + 1, decay)
    assert decay_at(10**9, decay) == decay
    assert decay_at(0, 0.5) == pytest.approx(0.1)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and BatchNorm statistics."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_by_hand(use_buffers: bool) -> None:
    task = StandardTask(normed(1), setting(ema_decay=DECAY, ema_buffers=use_buffers))
    expected = tensors_of(task.module)
    assert "1.running_mean" in expected
    for step in range(6):
        task.step(batch_of(8, seed=step), step_at(8, step=step))
        decay = decay_at(step, DECAY)
        for name, tensor in tensors_of(task.module).items():
            expected[name] = decay * expected[name] + (1 - decay) * tensor
    last = copy.deepcopy(task.module)
    with task.averaged_weights():
        for name, tensor in tensors_of(task.module).items():
            if use_buffers or not name.startswith("1.running"):
                torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-7)
                assert not torch.equal(tensor, last.state_dict()[name])
            else:
                assert torch.equal(tensor, last.state_dict()[name])
    assert_same_network(task.module, last, atol=0)


def test_training_is_the_same_with_and_without_an_average() -> None:
    with_average, without = (StandardTask(normed(1), setting(ema_decay=decay)) for decay in (DECAY, None))
    for step in range(4):
        for task in (with_average, without):
            task.step(batch_of(8, seed=step), step_at(8, step=step))
    assert_same_network(with_average.module, without.module, atol=0)
    assert not any(name.startswith("ema.") for name in without.state().tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_skipped_leaves_the_average(kind: str) -> None:
    task = task_of(kind, SINGLE_PROCESS, ema_decay=DECAY, ema_buffers=True)
    task.step(batch_at(1, task.device), position(1))
    before = {name: tensor.clone() for name, tensor in task.state().tensors.items() if name.startswith("ema.")}
    assert before
    task.step(batch_at(POISONED, task.device), position(POISONED))
    after = task.state().tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_average_is_saved_and_loaded_in_place(use_buffers: bool) -> None:
    first = StandardTask(normed(1), setting(ema_decay=DECAY, ema_buffers=use_buffers))
    for step in range(3):
        first.step(batch_of(8, seed=step), step_at(8, step=step))
    saved = first.state()
    saved.tensors = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    second = StandardTask(normed(7), setting(ema_decay=DECAY, ema_buffers=use_buffers))
    addresses = {name: tensor.data_ptr() for name, tensor in second.state().tensors.items()}
    second.load(saved)
    for task in (first, second):
        for step in range(3, 6):
            task.step(batch_of(8, seed=step), step_at(8, step=step))
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name
    assert all(
        tensor.data_ptr() == addresses[name]
        for name, tensor in second.state().tensors.items()
        if name.startswith("ema.")
    )


def test_an_average_of_another_network_is_refused() -> None:
    average = WeightAverage(linear(1), DECAY)
    with pytest.raises(DataError, match=r"ema.*--redo"):
        average.load(WeightAverage(normed(1), DECAY).state())


def test_a_finished_training_is_loaded_with_its_average_if_it_has_one() -> None:
    twins = TwinModel(linear(1), linear(2))
    average = WeightAverage(TwinModel(linear(3), linear(4)), DECAY).state()
    load_averages(twins, average)
    assert_same_network(twins.a, linear(3), atol=0)
    assert_same_network(twins.b, linear(4), atol=0)
    load_averages(twins, {"model.a": torch.zeros(1)})
    assert_same_network(twins.a, linear(3), atol=0)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_a_finished_training_is_loaded_with_the_statistics_that_it_was_evaluated_with(use_buffers: bool) -> None:
    task = StandardTask(normed(1), setting(ema_decay=DECAY, ema_buffers=use_buffers))
    for step in range(3):
        task.step(batch_of(8, seed=step), step_at(8, step=step))
    read = normed(2)
    load_module(read, task.state().tensors, "model.")
    load_averages(read, task.state().tensors)
    with task.averaged_weights():
        assert_same_network(read, task.module, atol=0)


class Judged:
    """Predictions that agree more from epoch to epoch until the second; notes the network that it was shown."""

    def __init__(self) -> None:
        self.shown: list[nn.Module] = []

    def __call__(self, network: nn.Module) -> "Judged":
        self.shown.append(copy.deepcopy(network))
        return self

    def agreement(self) -> float:
        return [0.1, 0.5, 0.3][len(self.shown) - 1]


@pytest.mark.parametrize("best", [True, False])
def test_a_fold_judges_and_predicts_with_the_average(best: bool) -> None:
    judge = Judged()
    task = FoldTask(normed(1), setting(ema_decay=DECAY), judge if best else None)  # type: ignore[arg-type]
    averages = []
    for epoch in range(3):
        task.step(batch_of(8, seed=epoch), step_at(8, step=epoch))
        for work in task.after_epoch(epoch):
            work()
        with task.averaged_weights():
            averages.append(copy.deepcopy(task.module))
    for shown, average in zip(judge.shown, averages, strict=False):
        assert_same_network(shown, average, atol=0)
    assert_same_network(task.round_network(), averages[1 if best else 2], atol=0)
