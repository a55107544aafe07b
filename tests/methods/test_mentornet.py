"""MentorNet PD: its curriculum by hand, a training against a plain reference, and a threshold that is state."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.toy_networks import (
    RATE,
    LabelledBatch,
    assert_same_network,
    batch_of,
    descend,
    linear,
    losses_of,
    normed,
    setting,
    step_at,
)
from trainer.config.optimisation import OptimizerConfig
from trainer.loading.batch import Batch
from trainer.loading.sample_order import draw_uniforms
from trainer.methods.mentornet import (
    MentorNetTask,
    Phase,
    dropout_rate,
    move_threshold,
    percentile_of,
    phase_at,
    weigh_losses,
)
from trainer.run.preflight import check_rows
from trainer.run.recipe import load_recipe

quick = settings(max_examples=60, deadline=None)
TOTAL, STREAM, ROWS = 100, 7, 10
PER_EPOCH = 391  # CIFAR-10 in batches of 128


@pytest.mark.parametrize(
    ("epoch", "first", "last", "dropped"),
    [
        (0, Phase.BURN_IN, Phase.BURN_IN, 0.5),
        (33, Phase.BURN_IN, Phase.BURN_IN, 0.5),
        (34, Phase.BURN_IN, Phase.BURN_IN, 0.05),  # 17 %
        (37, Phase.BURN_IN, Phase.BURN_IN, 0.05),
        (38, Phase.SELECT, Phase.SELECT, 0.05),  # 19 %: the authors' hundredths 0 to 18
        (179, Phase.SELECT, Phase.SELECT, 0.05),
        (180, Phase.LATE, Phase.LATE, 0.05),  # 90 %
        (199, Phase.LATE, Phase.LATE, 0.05),
    ],
)
def test_the_phases_of_200_epochs_by_hand(epoch, first, last, dropped):
    steps = epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH - 1
    assert [phase_at(step, 200 * PER_EPOCH) for step in steps] == [first, last]
    assert [dropout_rate(step, 200 * PER_EPOCH) for step in steps] == [dropped, dropped]


@given(st.integers(1, 10**6), st.data())
@quick
def test_phases_follow_each_other_and_dropout_never_rises(total, data):
    step = data.draw(st.integers(0, max(0, total - 2)))
    later = min(step + 1, total - 1)
    assert phase_at(0, total) is Phase.BURN_IN
    assert phase_at(step, total) <= phase_at(later, total)
    assert dropout_rate(step, total) >= dropout_rate(later, total)


@pytest.mark.parametrize(
    ("share", "rows", "expected"),
    [(0.75, 128, 95), (0.5, 128, 64), (0.5, 5, 2), (0.75, 5, 3), (0.75, 2, 1), (0.5, 1, 0), (0.1, 3, 0)],
)
def test_the_percentile_by_hand(share, rows, expected):
    """Of the losses 0, 1, ..., rows - 1, the one nearest to share * (rows - 1); halves count upwards."""
    losses = torch.arange(float(rows))[torch.randperm(rows)]
    assert percentile_of(losses, torch.ones(rows), share).item() == expected


rows_of_losses = st.lists(st.tuples(st.floats(0, 50, width=32), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40)


@given(rows_of_losses, st.floats(0.01, 0.99))
@quick
def test_the_percentile_is_that_of_the_real_rows(rows, share):
    losses, weights = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
    real = sorted(losses[weights > 0].tolist())
    found = percentile_of(losses, weights, share).item()
    assert found == (real[math.floor(share * (len(real) - 1) + 0.5)] if real else math.inf)


def test_the_weights_by_hand():
    losses, threshold = torch.tensor([0.0, 1.0, 1.25, 1.5, 2.0, 3.0]), torch.tensor(1.0, dtype=torch.float64)
    weights = {phase: weigh_losses(losses, threshold, torch.tensor(int(phase))).tolist() for phase in Phase}
    assert weights[Phase.BURN_IN] == [1, 1, 1, 1, 1, 1]
    assert weights[Phase.SELECT] == [1, 1, 0, 0, 0, 0]
    assert weights[Phase.LATE] == [1, 1, 0.75, 0.5, 0, 0]


@given(st.lists(st.floats(0, 50, width=32), min_size=2, max_size=30), st.floats(0, 50), st.sampled_from(list(Phase)))
@quick
def test_weights_are_shares_that_fall_with_the_loss(losses, threshold, phase):
    losses = torch.tensor(sorted(losses))
    weights = weigh_losses(losses, torch.tensor(threshold, dtype=torch.float64), torch.tensor(int(phase)))
    assert (weights >= 0).all()
    assert (weights <= 1).all()
    assert (weights.diff() <= 0).all()


def test_the_threshold_is_an_average_that_halves():
    threshold = torch.zeros((), dtype=torch.float64)
    seen = []
    for percentile in (2.0, 4.0, 1.0):
        threshold = move_threshold(threshold, torch.tensor(percentile))
        seen.append(threshold.item())
    assert seen == [1.0, 2.5, 1.75]


def task_of(build=linear, share=0.5, samples=ROWS, **form):
    return MentorNetTask(build(1), setting(steps_per_epoch=5, epochs=TOTAL // 5, **form), share, STREAM, samples)


def kept_rows(batch: Batch, epoch: int, rate: float) -> list[bool]:
    ids = batch.ids.clamp(min=0).numpy()
    return (draw_uniforms(STREAM, epoch, ids, "example dropout").astype(np.float32) >= rate).tolist()


class Reference:
    """The authors' rules, one row after the other."""

    def __init__(self, network, share):
        self.network, self.share, self.threshold = copy.deepcopy(network).train(), share, 0.0

    def step(self, batch, step, epoch):
        losses = losses_of(self.network, batch.images, batch.labels)
        real = [row for row in range(len(losses)) if batch.weights[row] > 0]
        ordered = sorted(losses[row].item() for row in real)
        percentile = ordered[math.floor(self.share * (len(real) - 1) + 0.5)]
        self.threshold = 0.5 * self.threshold + 0.5 * percentile
        kept = kept_rows(batch, epoch, 0.5 if step < 17 else 0.05)
        total, weight = losses.sum() * 0.0, 0.0
        for row in real:
            above = losses[row].item() - self.threshold
            given_weight = 1.0 if step < 19 else float(above <= 0) if step < 90 else min(1.0, max(0.0, 1 - above))
            total = total + losses[row] * given_weight * kept[row]
            weight += given_weight * kept[row]
        loss = total / len(real)
        self.network.zero_grad()
        loss.backward()
        descend(self.network)
        return loss.item(), weight / len(real)


@pytest.mark.parametrize("build", [linear, normed])
def test_a_training_is_that_of_the_reference(build):
    """100 steps, so that a step is a hundredth: all phases, short batches, unreadable rows."""
    task, expected = task_of(build), Reference(build(1), 0.5)
    weights = []
    for step in range(TOTAL):
        real = 6 if step % 5 == 4 else ROWS
        batch = batch_of(ROWS, real=real, seed=step % 3)
        batch.weights[step % real] = 0
        epoch = step // 5
        loss, weight = expected.step(batch, step, epoch)
        report = task.step(batch, step_at(real, epoch=epoch, step=step))
        assert report["loss"].item() == pytest.approx(loss, abs=1e-5)
        assert report["mean_weight"].item() == pytest.approx(weight, abs=1e-5)
        assert report["loss_threshold"].item() == pytest.approx(expected.threshold, abs=1e-5)
        weights.append(weight)
    assert_same_network(task.module, expected.network, atol=1e-4)
    assert 0.3 < np.mean(weights[:17]) < 0.7  # half of the rows are dropped
    assert np.mean(weights[17:19]) > 0.8
    assert np.mean(weights[19:90]) < 0.8  # those with large losses have no weight
    assert any(0 < weight * 9 % 1 < 1 for weight in weights[90:])  # shares of rows


def test_rows_are_dropped_by_their_id_and_epoch_alone():
    """The rows of a step may come in any order, to any rank; another epoch drops others."""
    losses = []
    for order in (torch.arange(ROWS), torch.arange(ROWS).flip(0)):
        task, batch = task_of(), batch_of(ROWS)
        shuffled = LabelledBatch(batch.ids[order], batch.images[order], batch.weights[order])
        losses.append(task.step(shuffled, step_at(ROWS, epoch=3)))
    torch.testing.assert_close(losses[0], losses[1])
    batch = batch_of(ROWS)
    dropped = [kept_rows(batch, epoch, 0.5) for epoch in range(20)]
    assert len({tuple(each) for each in dropped}) > 15
    assert 0.35 < np.mean(dropped) < 0.65


def test_a_new_task_drops_the_same_rows_in_the_middle_of_an_epoch():
    first, second = task_of(normed), task_of(normed)
    for number in range(13):
        first.step(batch_of(ROWS, seed=number), step_at(ROWS, epoch=number // 5, step=number))
    state = first.state()
    state.tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    address = second._threshold.data_ptr()
    second.load(state)
    assert second._threshold.data_ptr() == address, "CUDA graphs refer to the tensor"
    assert second._threshold.item() > 0
    for task in (first, second):
        for number in range(13, 40):
            task.step(batch_of(ROWS, seed=number), step_at(ROWS, epoch=number // 5, step=number))
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name


def test_the_threshold_does_not_move_with_steps_that_are_not_taken():
    task, batch = task_of(), batch_of(ROWS)
    task.step(batch, step_at(ROWS))
    before = task.state().tensors["table.threshold"].clone()
    poisoned = batch_of(ROWS)
    poisoned.images[2] = torch.nan
    task.step(poisoned, step_at(ROWS, step=1))
    empty = batch_of(ROWS)
    empty.weights.zero_()
    task.step(empty, step_at(ROWS, step=2))
    with task.without_effects():  # as before CUDA graphs are captured
        task.step(batch, step_at(ROWS, step=3))
    assert torch.equal(task.state().tensors["table.threshold"], before)
    task.step(batch, step_at(ROWS, step=4))
    assert not torch.equal(task.state().tensors["table.threshold"], before)


def test_smoothing_changes_what_is_learnt_but_not_the_weights():
    reports = []
    for smoothing in (0.0, 0.4):
        task = task_of(label_smoothing=smoothing)
        task._threshold.fill_(1.5)
        reports.append(task.step(batch_of(ROWS), step_at(ROWS, step=50)))
    assert 0 < reports[0]["mean_weight"] < 1
    for name in ("mean_weight", "loss_threshold", "train_accuracy"):
        assert reports[0][name] == reports[1][name]
    assert reports[0]["loss"] != reports[1]["loss"]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_row_without_weight_moves_nothing(kind):
    """Only one row is below the threshold: other images of the other rows change nothing."""
    optimizer = OptimizerConfig(kind=kind, momentum=0.0, learning_rate=RATE)
    after = []
    for change in (1.0, 1.01):
        task, batch = task_of(optimizer=optimizer, share=0.01), batch_of(ROWS)
        losses = losses_of(task.module, batch.images, batch.labels).detach()
        easiest = int(losses.argmin())
        task._threshold.fill_(losses.min().item())
        others = torch.arange(ROWS) != easiest
        batch.images[others] *= change
        assert losses_of(task.module, batch.images, batch.labels).argmin() == easiest
        task.step(batch, step_at(ROWS, epoch=4, step=50))
        after.append(task.module)
    assert kept_rows(batch_of(ROWS), 4, 0.05)[easiest]
    assert_same_network(after[0], after[1], atol=1e-7)


def test_a_step_that_would_be_split_is_refused():
    overrides = ["methods=[mentornet]", "mentornet.epochs=1", "incv=null"]
    check_rows(load_recipe(RECIPES / "tiny.yaml", [*overrides, "batch.micro=16"]), 2)
    with pytest.raises(ConfigError, match=r"batch\.micro is 15.*mentornet.*at least 16"):
        check_rows(load_recipe(RECIPES / "tiny.yaml", [*overrides, "batch.micro=15"]), 2)
    split = ["methods=[decoupling]", "decoupling.epochs=1", "incv=null", "batch.micro=3"]
    check_rows(load_recipe(RECIPES / "tiny.yaml", split), 1)
