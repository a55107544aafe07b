"""Decoupling: each network learns from its own loss on the rows whose predictions differ, over max(0.1 B, D)."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.toy_networks import (
    RATE,
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
from trainer.methods.decoupling import DecouplingTask, divisor_of, find_disagreements
from trainer.models.twin import TwinModel

quick = settings(max_examples=60, deadline=None)


def test_the_rows_that_differ_by_hand():
    of_a = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 5.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    of_b = torch.tensor([[1.0, 0.0, 0.5], [4.0, 3.0, 1.0], [0.0, 9.0, 5.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])  # the fourth row is unreadable
    assert find_disagreements(of_a, of_b, weights).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("disagreements", "rows", "divisor"),
    [(128, 128, 128), (20, 128, 20), (13, 128, 13), (12, 128, 12.8), (0, 128, 12.8), (1, 1, 1), (0, 1, 0.1)],
)
def test_the_divisor_by_hand(disagreements, rows, divisor):
    found = divisor_of(torch.tensor(float(disagreements)), torch.tensor(float(rows)))
    assert found.item() == pytest.approx(divisor)


@given(st.integers(0, 5000), st.integers(0, 5000))
@quick
def test_the_divisor_is_positive_and_no_row_weighs_more_than_ten_rows_of_the_batch(disagreements, rows):
    disagreements = min(disagreements, rows)
    found = divisor_of(torch.tensor(float(disagreements)), torch.tensor(float(rows))).item()
    assert found > 0
    assert disagreements <= found <= max(disagreements, 1 + rows / 10)
    assert rows / found <= 10.0001


def reference(network: nn.Module, peer: nn.Module, batch: Batch, rate: float = RATE) -> tuple[nn.Module, float]:
    """The network after a step, row by row, and its loss."""
    trained, other = copy.deepcopy(network).train(), copy.deepcopy(peer).train()
    own, others = trained(batch.images), other(batch.images)
    real = [row for row in range(len(batch.labels)) if batch.weights[row] > 0]
    differ = [row for row in real if own[row].argmax() != others[row].argmax()]
    total = own.sum() * 0.0
    for row in differ:
        total = total + own[row].logsumexp(0) - own[row, batch.labels[row]]
    loss = total / max(0.1 * len(real), len(differ))
    loss.backward()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter -= rate * parameter.grad
    return trained, loss.item()


def pair(build=linear, compare="one_pass", **form):
    return DecouplingTask(TwinModel(build(1), build(2)), setting(**form), compare)


@pytest.mark.parametrize("build", [linear, normed])
@pytest.mark.parametrize("real", [10, 7, 1])
def test_a_step_is_that_of_the_reference(build, real):
    batch, task = batch_of(10, real=real), pair(build)
    a, b = copy.deepcopy(task.module.a), copy.deepcopy(task.module.b)
    report = task.step(batch, step_at(real))
    (after_a, loss_a), (after_b, loss_b) = reference(a, b, batch), reference(b, a, batch)
    assert_same_network(task.module.a, after_a)
    assert_same_network(task.module.b, after_b)
    assert report["loss"].item() == pytest.approx((loss_a + loss_b) / 2, abs=1e-6)
    right = [((net.train()(batch.images).argmax(1) == batch.labels) * batch.weights).sum().item() for net in (a, b)]
    assert report["train_accuracy"].item() == pytest.approx(sum(right) / 2 / real)
    for letter, hits, loss in zip("ab", right, (loss_a, loss_b), strict=True):
        assert report[f"train_accuracy_{letter}"].item() == pytest.approx(hits / real)
        assert report[f"loss_{letter}"].item() == pytest.approx(loss, abs=1e-6)


def rows_that_differ_in_eval_mode(task, batch):
    a, b = (copy.deepcopy(each).eval()(batch.images) for each in (task.module.a, task.module.b))
    return find_disagreements(a, b, batch.weights).nonzero()[:, 0]


def alone(network: nn.Module, batch: Batch, rows: torch.Tensor, divisor: float) -> tuple[nn.Module, float]:
    """A copy of the network after a step of SGD on these rows alone, in train mode, and its loss."""
    trained = copy.deepcopy(network).train()
    loss = losses_of(trained, batch.images[rows], batch.labels[rows]).sum() / divisor
    loss.backward()
    descend(trained)
    return trained, loss.item()


def pair_that_often_agrees(build):
    task = pair(build, "eval_first")
    of_a, of_b = task.module.a.state_dict(), task.module.b.state_dict()
    for name in (name for name in of_a if of_a[name].is_floating_point()):
        of_b[name].lerp_(of_a[name], 0.6)
    return task


@pytest.mark.parametrize(("build", "seeds"), [(linear, range(6)), (normed, range(40))])
def test_eval_first_compares_in_eval_mode_and_trains_on_the_rows_that_differ_alone(build, seeds):
    """With BatchNorm, where the rows that differ fill the batch without remainder: otherwise some are repeated once
    more than others."""
    checked = 0
    for seed in seeds:
        batch, task = batch_of(18, real=12, seed=seed), pair_that_often_agrees(build)
        a, b = copy.deepcopy(task.module.a), copy.deepcopy(task.module.b)
        differ = rows_that_differ_in_eval_mode(task, batch)
        report = task.step(batch, step_at(12))
        assert report["disagreement"].item() == pytest.approx(len(differ) / 12)
        if build is normed and 18 % len(differ):
            continue
        for letter, before, after in (("a", a, task.module.a), ("b", b, task.module.b)):
            expected, loss = alone(before, batch, differ, max(1.2, len(differ)))
            assert report[f"loss_{letter}"].item() == pytest.approx(loss, abs=1e-5)
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(dict(after.named_parameters())[name], parameter, atol=1e-5, rtol=0)
            right = ((before.eval()(batch.images).argmax(1) == batch.labels) * batch.weights).sum().item()
            assert report[f"train_accuracy_{letter}"].item() == pytest.approx(right / 12)
        checked += 1
    assert checked >= 4


def test_eval_first_and_one_pass_differ_only_where_batchnorm_does():
    """Without BatchNorm, a network predicts the same in both modes, and whichever rows it sees together."""
    for build, same in ((linear, True), (normed, False)):
        one, first = pair(build, "one_pass"), pair(build, "eval_first")
        for number in range(3):
            reports = [task.step(batch_of(10, seed=number), step_at(10, step=number)) for task in (one, first)]
        assert (abs(reports[0]["loss_a"] - reports[1]["loss_a"]) < 1e-6) == same
        distance = (one.module.a[-1].weight - first.module.a[-1].weight).abs().max().item()
        assert (distance < 1e-6) == same


def test_an_unreadable_row_is_neither_learnt_nor_counted():
    batch, task = batch_of(10), pair()
    a, b = copy.deepcopy(task.module.a), copy.deepcopy(task.module.b)
    differ = find_disagreements(a(batch.images), b(batch.images), batch.weights).nonzero()[:, 0].tolist()
    assert len(differ) > 2
    batch.weights[differ[0]] = 0
    report = task.step(batch, step_at(10))
    assert_same_network(task.module.a, reference(a, b, batch)[0])
    assert report["disagreement"].item() == pytest.approx((len(differ) - 1) / 9)


@pytest.mark.parametrize("compare", ["one_pass", "eval_first"])
def test_networks_that_agree_learn_nothing_and_give_no_nan(compare):
    task = DecouplingTask(TwinModel(linear(1), linear(1)), setting(), compare)
    before = copy.deepcopy(task.module)
    report = task.step(batch_of(10), step_at(10))
    assert_same_network(task.module, before, atol=0)
    assert (report["loss"].item(), report["disagreement"].item(), report["counted"].item()) == (0, 0, 1)
    assert task.state().values["guard"] == {"skipped": 0, "in_a_row": 0}


@pytest.mark.parametrize("compare", ["one_pass", "eval_first"])
def test_large_logits_in_fp16_are_no_reason_to_skip_a_step(compare):
    """A number that is added to all logits changes no probability; the sum of all logits exceeds fp16."""
    task = DecouplingTask(TwinModel(linear(1), linear(2)), setting(precision="fp16"), compare)
    with torch.no_grad():
        for network in (task.module.a, task.module.b):
            network[-1].bias += 80
    before = copy.deepcopy(task.module)
    report = task.step(batch_of(128), step_at(128))
    assert torch.isfinite(report["loss"])
    assert not torch.equal(task.module.a[-1].weight, before.a[-1].weight)


def test_a_single_disagreement_in_40_rows_counts_as_one_of_four():
    """All rows show the same image, on which the networks agree, but for one."""
    batch, task = batch_of(40), pair()
    a = copy.deepcopy(task.module.a)
    differ = find_disagreements(a(batch.images), task.module.b(batch.images), batch.weights)
    other = batch.images[int(differ.argmax())].clone()
    batch.images[:] = batch.images[int(differ.argmin())].clone()
    batch.images[7] = other
    report = task.step(batch, step_at(40))
    assert report["disagreement"].item() == pytest.approx(1 / 40)
    (losses_of(a, batch.images[7:8], batch.labels[7:8]).sum() / 4).backward()
    torch.testing.assert_close(task.module.a[1].weight, a[1].weight - RATE * a[1].weight.grad)


@pytest.mark.parametrize("compare", ["one_pass", "eval_first"])
@pytest.mark.parametrize("micro", [1, 3, 5, 11])
@pytest.mark.parametrize("real", [12, 7, 2])
def test_a_split_step_is_the_whole_one(micro, real, compare):
    """The divisor is that of the whole step: with parts of their own, a part that agrees would not count."""
    tasks = [
        DecouplingTask(TwinModel(linear(1).double(), linear(2).double()), setting(micro=m), compare)
        for m in (micro, None)
    ]
    for number in range(3):
        batch = batch_of(12, real=real, seed=number)
        batch.images = batch.images.double()
        reports = [task.step(batch, step_at(real, step=number)) for task in tasks]
        torch.testing.assert_close(reports[0], reports[1])
    assert_same_network(tasks[0].module, tasks[1].module, atol=1e-12)


def test_smoothing_changes_what_is_learnt_but_not_from_which_rows():
    batch, plain, smooth = batch_of(10), pair(), pair(label_smoothing=0.3)
    a, b = copy.deepcopy(plain.module.a), plain.module.b
    differ = find_disagreements(a(batch.images), b(batch.images), batch.weights)
    reports = [task.step(batch, step_at(10)) for task in (plain, smooth)]
    assert reports[0]["disagreement"] == reports[1]["disagreement"]
    log_p = a(batch.images).log_softmax(1)
    losses = -0.7 * log_p[torch.arange(10), batch.labels] - 0.3 * log_p.mean(1)
    ((losses * differ).sum() / differ.sum()).backward()
    torch.testing.assert_close(smooth.module.a[1].weight, a[1].weight - RATE * a[1].weight.grad)


def test_gradients_are_clipped_as_they_are_learnt():
    """The limit applies to the gradient of the divided loss, not to that of its constant share."""
    batch, limit = batch_of(10), 0.05
    task = pair(optimizer=OptimizerConfig(kind="sgd", momentum=0.0, learning_rate=RATE, clip=limit))
    before = copy.deepcopy(task.module.a)
    task.step(batch, step_at(10))
    moved = sum(
        ((one - other) ** 2).sum() for one, other in zip(task.module.a.parameters(), before.parameters(), strict=True)
    )
    assert moved.sqrt().item() == pytest.approx(RATE * limit, rel=1e-4)


@pytest.mark.parametrize("compare", ["one_pass", "eval_first"])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_task_goes_on_from_its_state_bit_for_bit(kind, compare):
    optimizer = OptimizerConfig(kind=kind, learning_rate=0.01, weight_decay=0.01)
    first, second = (pair(normed, compare, optimizer=optimizer) for _ in range(2))
    for number in range(3):
        first.step(batch_of(8, seed=number), step_at(8, step=number))
    state = first.state()
    state.tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    second.load(state)
    for task in (first, second):
        for number in range(3, 6):
            task.step(batch_of(8, seed=number), step_at(8, step=number))
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name
