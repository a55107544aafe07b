"""Co-teaching: n(e), the small-loss selection, and that each network trains on exactly its peer's choice."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.toy_networks import (
    TARGETS,
    LabelledBatch,
    after_one_step,
    assert_same_network,
    batch_of,
    easiest,
    linear,
    losses_of,
    normed,
    setting,
    step_at,
)
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule, loss_ranks, rows_to_keep
from trainer.models.twin import TwinModel

quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize(
    ("rows", "epoch", "forget_rate", "kept"),
    [
        (128, 0, 0.2, 128),
        (128, 5, 0.2, 115),  # 115.2
        (128, 10, 0.2, 102),  # 102.4
        (128, 199, 0.2, 102),
        (53, 3, 0.45, 46),  # 45.845
        (100, 1, 0.17, 98),  # 98.3
        (1, 10, 0.4, 1),
        (1, 10, 1.0, 1),
        (64, 20, 1.0, 1),
        (7, 50, 0.0, 7),
    ],
)
def test_kept_rows_by_hand(rows, epoch, forget_rate, kept):
    assert rows_to_keep(rows, epoch, forget_rate) == kept


def test_the_ramp_has_the_length_it_is_given():
    assert [rows_to_keep(100, epoch, 0.3, ramp_epochs=3) for epoch in range(5)] == [100, 90, 80, 70, 70]


@given(st.integers(1, 5000), st.integers(0, 300), st.floats(0, 1), st.integers(1, 20))
@quick
def test_kept_rows_is_never_none_and_never_more_than_there_are(rows, epoch, forget_rate, ramp):
    kept = rows_to_keep(rows, epoch, forget_rate, ramp)
    assert 1 <= kept <= rows
    exact = rows * (1 - forget_rate * min(epoch / ramp, 1))
    assert kept == 1 or abs(kept - exact) <= 0.5 + 1e-9
    assert rows_to_keep(rows, epoch + 1, forget_rate, ramp) <= kept


losses_with_ties = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 0.25, 1.0, 2.5]), st.floats(0, 50, width=32)), st.sampled_from([0.0, 1.0])
    ),
    min_size=1,
    max_size=40,
)


@given(losses_with_ties, st.integers(0, 45))
@quick
def test_the_easiest_real_rows_are_chosen(rows, keep):
    losses, weights = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    real = np.flatnonzero(weights)
    expected = real[np.lexsort((real, losses[real]))][:keep]
    places = loss_ranks(torch.from_numpy(losses), torch.from_numpy(weights)).numpy()
    assert sorted(places) == list(range(len(losses)))
    assert np.argsort(places)[: min(keep, len(real))].tolist() == expected.tolist()


def task_of(a, b, rank, batch, forget_rate=0.5, ramp_epochs=10, **form):
    return CoteachingTask(TwinModel(a, b), setting(**form), ForgetSchedule(batch, forget_rate, ramp_epochs), rank)


@pytest.mark.parametrize("build", [linear, normed])
@pytest.mark.parametrize("epoch", [0, 4, 12])
def test_one_pass_trains_each_network_on_its_peers_choice(build, epoch):
    """The losses that rank are those of the training forward, BatchNorm over the whole batch."""
    a, b, batch = build(1), build(2), batch_of(10)
    keep = round(10 * (1 - 0.5 * min(epoch / 10, 1)))
    expected = {}
    for name, network, peer in (("a", a, b), ("b", b, a)):
        chosen = easiest(losses_of(copy.deepcopy(peer).train(), batch.images, batch.labels), keep)
        trained = copy.deepcopy(network).train()
        losses_of(trained, batch.images, batch.labels)[chosen].mean().backward()
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter -= 0.1 * parameter.grad
        expected[name] = trained
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), "one_pass", batch=10)
    report = task.step(batch, step_at(10, epoch=epoch))
    assert_same_network(task.module.a, expected["a"])
    assert_same_network(task.module.b, expected["b"])
    assert report["kept"].item() == keep


@pytest.mark.parametrize("build", [linear, normed])
@pytest.mark.parametrize("epoch", [0, 4, 12])
def test_eval_first_ranks_in_eval_mode_and_trains_on_the_chosen_rows_alone(build, epoch):
    """BatchNorm is given the chosen rows only: weights, statistics and counter are those of that forward."""
    a, b, batch = build(1), build(2), batch_of(10)
    keep = round(10 * (1 - 0.5 * min(epoch / 10, 1)))
    expected = {}
    with torch.no_grad():
        for name, network, peer in (("a", a, b), ("b", b, a)):
            chosen = easiest(losses_of(copy.deepcopy(peer).eval(), batch.images, batch.labels), keep)
            expected[name] = (network, batch.images[chosen], batch.labels[chosen])
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), "eval_first", batch=10)
    report = task.step(batch, step_at(10, epoch=epoch))
    assert_same_network(task.module.a, after_one_step(*expected["a"]))
    assert_same_network(task.module.b, after_one_step(*expected["b"]))
    assert report["kept"].item() == keep


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_smoothing_changes_what_is_learnt_but_not_what_is_chosen(rank):
    a, b, batch = linear(1), linear(2), batch_of(10)
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), rank, batch=10, label_smoothing=0.9)
    task.step(batch, step_at(10, epoch=12))
    for network, trained, peer in ((a, task.module.a, b), (b, task.module.b, a)):
        chosen = easiest(losses_of(peer, batch.images, batch.labels), 5)
        log_p = network(batch.images[chosen]).log_softmax(1)
        given_label = log_p[torch.arange(5), batch.labels[chosen]]
        (-0.1 * given_label - 0.9 * log_p.mean(1)).mean().backward()
        moved = network[1].weight - 0.1 * network[1].weight.grad
        torch.testing.assert_close(trained[1].weight, moved)


def test_the_two_ways_of_ranking_differ_where_batchnorm_does():
    """Or the two tests above could not tell them apart."""
    batch, a, b = batch_of(10), normed(1), normed(2)
    eval_choice, train_choice = (
        easiest(losses_of(getattr(copy.deepcopy(b), mode)(), batch.images, batch.labels), 5)
        for mode in ("eval", "train")
    )
    assert set(eval_choice) != set(train_choice)
    after = []
    for rank in ("one_pass", "eval_first"):
        task = task_of(copy.deepcopy(a), copy.deepcopy(b), rank, batch=10)
        task.step(batch, step_at(10, epoch=10))
        after.append(task.module.a[1].running_mean.clone())
    assert not torch.allclose(*after, atol=1e-3)


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_rows_of_c_compete_for_places_that_rows_of_s_count(rank):
    """Six rows of S and three of C at half forgetting: three places, and easy rows of C take them."""
    a, b, batch = linear(1), linear(2), batch_of(9)
    with torch.no_grad():  # relabel the rows of C as both networks like them best
        liked = (a(batch.images) + b(batch.images)).argmax(1)
    batch.targets = TARGETS.clone()
    batch.targets[6:9] = liked[6:]
    chosen = easiest(losses_of(b, batch.images, batch.labels), 3)
    assert set(chosen) & {6, 7, 8}
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), rank, batch=6, targets=batch.targets)
    report = task.step(batch, step_at(6, candidates=3, epoch=10))
    assert report["kept"].item() == 3
    assert_same_network(task.module.a, after_one_step(a, batch.images[chosen], batch.labels[chosen]))


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_a_short_last_batch_counts_its_real_rows_only(rank):
    """Five real rows in a shape of eight: n(e) is of the five, and fill rows change neither loss nor step."""
    a, b, filled = linear(1), linear(2), batch_of(8, real=5)
    bare = LabelledBatch(filled.ids[:5], filled.images[:5], torch.ones(5))
    reports = []
    for batch in (filled, bare):
        task = task_of(copy.deepcopy(a), copy.deepcopy(b), rank, batch=8, forget_rate=0.4)
        report = task.step(batch, step_at(5, epoch=10))
        chosen = easiest(losses_of(b, bare.images, bare.labels), 3)
        assert_same_network(task.module.a, after_one_step(a, bare.images[chosen], bare.labels[chosen]))
        reports.append(report)
    assert reports[0]["kept"].item() == reports[1]["kept"].item() == 3
    torch.testing.assert_close(reports[0]["loss"], reports[1]["loss"])
    torch.testing.assert_close(reports[0]["train_accuracy"], reports[1]["train_accuracy"])


def test_a_choice_filled_up_to_the_fixed_shape_repeats_itself_evenly():
    """Three chosen rows shown twice give BatchNorm the mean and variance of the three."""
    a, b, batch = normed(1), normed(2), batch_of(8, real=4)
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), "eval_first", batch=8, forget_rate=0.25)
    report = task.step(batch, step_at(4, epoch=10))  # n(e) = 3 of 4, the shape is 6 of 8
    with torch.no_grad():
        chosen = easiest(losses_of(copy.deepcopy(b).eval(), batch.images, batch.labels), 3, range(4))
        others = easiest(losses_of(copy.deepcopy(a).eval(), batch.images, batch.labels), 3, range(4))
        loss_a = losses_of(copy.deepcopy(a).train(), batch.images[chosen], batch.labels[chosen]).mean()
        loss_b = losses_of(copy.deepcopy(b).train(), batch.images[others], batch.labels[others]).mean()
    torch.testing.assert_close(report["loss"], (loss_a + loss_b) / 2)
    seen = copy.deepcopy(a).train()
    seen(batch.images[chosen * 2])
    torch.testing.assert_close(task.module.a[1].running_mean, seen[1].running_mean)
    torch.testing.assert_close(task.module.a[1].running_var, seen[1].running_var)


def test_an_unreadable_row_is_never_learnt_however_easy():
    a, b, batch = linear(1), linear(2), batch_of(6)
    easy = easiest(losses_of(b, batch.images, batch.labels), 1)[0]
    batch.weights[easy] = 0
    task = task_of(copy.deepcopy(a), copy.deepcopy(b), "one_pass", batch=6)
    task.step(batch, step_at(6, epoch=10))
    chosen = easiest(losses_of(b, batch.images, batch.labels), 3, [row for row in range(6) if row != easy])
    assert_same_network(task.module.a, after_one_step(a, batch.images[chosen], batch.labels[chosen]))


class Recorder(nn.Module):
    """Remembers what it was shown and what it answered with."""

    def __init__(self, network):
        super().__init__()
        self.network, self.seen, self.answers = network, [], []

    def forward(self, images):
        logits = self.network(images)
        self.seen.append((self.training, images.clone()))
        self.answers.append(logits.dtype)
        return logits


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_both_networks_judge_the_same_rows(rank):
    a, b, batch = Recorder(linear(1)), Recorder(linear(2)), batch_of(10)
    task_of(a, b, rank, batch=10).step(batch, step_at(10, epoch=10))
    modes = [True] if rank == "one_pass" else [False, True]
    for recorder in (a, b):
        assert [training for training, _ in recorder.seen] == modes
        assert torch.equal(recorder.seen[0][1], batch.images)
        assert len(recorder.seen[-1][1]) == (10 if rank == "one_pass" else 5)


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_bf16_networks_are_judged_in_fp32(rank):
    a, b, batch = Recorder(linear(1)), Recorder(linear(2)), batch_of(10)
    report = task_of(a, b, rank, batch=10, precision="bf16").step(batch, step_at(10, epoch=10))
    assert set(a.answers) == {torch.bfloat16}
    assert report["loss"].dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in a.parameters())


@pytest.mark.parametrize("rank", ["one_pass", "eval_first"])
def test_the_report_is_of_each_network_and_the_mean_over_both(rank):
    a, b, batch = linear(1), linear(2), batch_of(10, real=8)
    with torch.no_grad():
        right = [((net(batch.images).argmax(1) == batch.labels)[:8]).sum().item() for net in (a, b)]
        choices = [easiest(losses_of(net, batch.images, batch.labels), 8, range(8)) for net in (b, a)]
        of_a, of_b = (losses_of(net, batch.images, batch.labels) for net in (a, b))
        losses = [of_a[choices[0]].mean().item(), of_b[choices[1]].mean().item()]
    report = task_of(a, b, rank, batch=8, forget_rate=0.0).step(batch, step_at(8))
    for letter, hits, loss in zip("ab", right, losses, strict=True):
        assert report[f"train_accuracy_{letter}"].item() == pytest.approx(hits / 8)
        assert report[f"loss_{letter}"].item() == pytest.approx(loss, abs=1e-6)
    assert losses[0] != pytest.approx(losses[1], abs=1e-3)
    assert report["train_accuracy"].item() == pytest.approx(sum(right) / 16)
    assert report["loss"].item() == pytest.approx(sum(losses) / 2, abs=1e-6)
