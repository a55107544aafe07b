"""Non-finite or unreadable input changes no weight, BatchNorm statistic or small-loss selection."""

import copy

import pytest
import torch

from tests.support.toy_networks import batch_of, normed, setting, step_at
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule, loss_ranks
from trainer.methods.decoupling import DecouplingTask
from trainer.methods.mentornet import MentorNetTask
from trainer.methods.standard import StandardTask
from trainer.models.twin import TwinModel

NAN, INF = float("nan"), float("inf")


def task_of(kind):
    if kind == "standard":
        return StandardTask(normed(1), setting())
    if kind.startswith("decoupling"):
        compare = "eval_first" if kind.endswith("eval_first") else "one_pass"
        return DecouplingTask(TwinModel(normed(1), normed(2)), setting(), compare)
    if kind == "mentornet":
        return MentorNetTask(normed(1), setting(), 0.75, stream=7, samples=8)
    return CoteachingTask(TwinModel(normed(1), normed(2)), setting(), ForgetSchedule(8, 0.5, 10), kind)


every_task = pytest.mark.parametrize(
    "kind", ["standard", "one_pass", "eval_first", "decoupling", "decoupling_eval_first", "mentornet"]
)


@every_task
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_batch_with_one_poisoned_image_leaves_no_trace(kind, poison):
    """At epoch 10 half the rows are forgotten: the poisoned one is not simply the noisiest."""
    task, batch = task_of(kind), batch_of(8)
    before = copy.deepcopy(task.module.state_dict())
    batch.images[3] = poison
    task.step(batch, step_at(8, epoch=10))
    after = task.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "num_batches" not in name)
    task.step(batch_of(8), step_at(8, epoch=10))
    assert all(torch.isfinite(tensor).all() for tensor in task.module.state_dict().values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in task.module.state_dict().items())


@every_task
def test_a_step_whose_images_are_all_unreadable_is_none(kind):
    task, batch = task_of(kind), batch_of(8, real=1)
    before = copy.deepcopy(task.module.state_dict())
    batch.weights[0] = 0
    values = task.step(batch, step_at(1))
    assert not any(values.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in task.module.state_dict().items())


@pytest.mark.parametrize(("losses", "weights", "keep"), [([1, NAN, 0.5], [1, 1, 0], 2), ([5, INF], [0, 1], 1)])
def test_rows_of_weight_0_are_never_chosen(losses, weights, keep):
    weights = torch.tensor(weights, dtype=torch.float32)
    places = loss_ranks(torch.tensor(losses, dtype=torch.float32), weights)
    chosen = places < min(keep, int(weights.sum()))
    assert chosen.any()
    assert weights[chosen].all()
