"""Gradient accumulation over micro-batches equals the step on the whole batch."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shards.errors import ConfigError
from tests.support import RECIPES
from tests.support.toy_networks import batch_of, descend, linear, losses_of, normed, setting, step_at
from trainer.config.fitting import batchnorm_rows, micro_batches
from trainer.estimate.dry_run import describe_plan
from trainer.loading.batch import Batch
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.standard import StandardTask
from trainer.models.twin import TwinModel
from trainer.run.preflight import check_rows
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

TINY = RECIPES / "tiny.yaml"


@given(st.integers(1, 5000), st.none() | st.integers(1, 600))
@settings(max_examples=100, deadline=None)
def test_parts_are_few_near_equal_and_none_is_larger_than_asked(rows, micro):
    parts = micro_batches(rows, micro)
    assert [row for part in parts for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == (1 if micro is None else -(-rows // micro))
    assert micro is None or max(sizes) <= micro


@pytest.mark.parametrize(
    ("batch", "world", "micro", "rows"),
    [
        (128, 1, None, 128),
        (128, 8, None, 16),
        (128, 3, None, 43),
        (128, 1, 50, 42),
        (32, 1, 10, 8),
        (128, 2, 500, 64),
    ],
)
def test_the_rows_of_a_batchnorm_group(batch, world, micro, rows):
    assert batchnorm_rows(batch, world, micro) == rows


def double(batch: Batch) -> Batch:
    return replace(batch, images=batch.images.double())


class Watched(nn.Module):
    """Remembers the shapes it was shown, and in which mode."""

    def __init__(self, network):
        super().__init__()
        self.network, self.shown = network, []

    def forward(self, images):
        self.shown.append((self.training, len(images)))
        return self.network(images)


def standard(build, micro):
    return StandardTask(build(1).double(), setting(micro=micro))


def pair(build, micro, batch=12, forget_rate=0.5, watch=lambda network: network):
    twins = TwinModel(watch(build(1).double()), watch(build(2).double()))
    return CoteachingTask(twins, setting(micro=micro), ForgetSchedule(batch, forget_rate, 10), "eval_first")


def assert_equal_weights(task, expected, tolerance=1e-12):
    for name, tensor in expected.module.state_dict().items():
        torch.testing.assert_close(task.module.state_dict()[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("micro", [1, 3, 5, 11, 12])
@pytest.mark.parametrize("real", [12, 7, 2])
def test_a_split_standard_step_is_the_whole_one(micro, real):
    """With 2 real rows in 12 most parts are nothing but fill."""
    split, whole = standard(linear, micro), standard(linear, None)
    for number in range(3):
        batch = double(batch_of(12, real=real, seed=number))
        reports = [task.step(batch, step_at(real, step=number)) for task in (split, whole)]
        torch.testing.assert_close(reports[0], reports[1])
    assert_equal_weights(split, whole)


@pytest.mark.parametrize("micro", [1, 3, 5, 11])
@pytest.mark.parametrize("epoch", [0, 4, 10])
@pytest.mark.parametrize("real", [12, 7, 2])
def test_a_split_step_of_co_teaching_makes_the_same_choice_and_the_same_step(micro, epoch, real):
    split, whole = pair(linear, micro), pair(linear, None)
    for number in range(3):
        batch = double(batch_of(12, real=real, seed=number))
        reports = [task.step(batch, step_at(real, epoch=epoch, step=number)) for task in (split, whole)]
        torch.testing.assert_close(reports[0], reports[1])
    assert_equal_weights(split, whole)


def test_ranking_in_eval_mode_does_not_notice_the_parts():
    """BatchNorm judges by its running statistics: logits of a row do not depend on the rows beside it."""
    split, whole = pair(normed, 3), pair(normed, None)
    batch = double(batch_of(12))
    for one, other in zip(split.eval_logits(batch.images), whole.eval_logits(batch.images), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("real", "epoch"), [(12, 0), (12, 10), (5, 10)])
def test_no_forward_takes_more_rows_than_asked_and_shapes_stay_fixed(real, epoch):
    task = pair(linear, 5, watch=Watched)
    task.step(double(batch_of(12, real=real)), step_at(real, epoch=epoch))
    chosen = [(True, 4)] * 3 if epoch == 0 else [(True, 3)] * 2  # n(0) = 12, n(10) = 6, whatever is real
    assert task.module.a.shown == task.module.b.shown == [(False, 4)] * 3 + chosen


def test_batchnorm_sees_a_part_at_a_time():
    batch, task, by_hand = double(batch_of(12)), standard(normed, 6), normed(1).double()
    task.step(batch, step_at(12))
    by_hand.train()
    for part in (slice(0, 6), slice(6, 12)):
        (losses_of(by_hand, batch.images[part], batch.labels[part]).sum() / 12).backward()
    descend(by_hand)
    for name, tensor in by_hand.state_dict().items():
        torch.testing.assert_close(task.module.state_dict()[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [standard, pair])
def test_what_is_not_finite_in_one_part_undoes_all_parts(make):
    task, batch = make(normed, 4), double(batch_of(12))
    before = copy.deepcopy(task.module.state_dict())
    batch.images[9] = torch.nan
    task.step(batch, step_at(12, epoch=10))
    after = task.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if "num_batches" not in name)
    assert task.state().values["guard"] == {"skipped": 1, "in_a_row": 1}  # one step, however many parts
    task.step(double(batch_of(12)), step_at(12, epoch=10))
    assert task.state().values["guard"] == {"skipped": 1, "in_a_row": 0}
    assert any(not torch.equal(before[name], tensor) for name, tensor in task.module.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "world", "rows"),
    [
        (["batch.micro=47"], 1, 48),  # 32 rows of S and at most 16 of C
        (["batch.micro=11"], 4, 12),
        (["batch.micro=31", "methods=[coteaching]"], 1, 32),
    ],
)
def test_one_pass_cannot_be_split(overrides, world, rows):
    recipe = load_recipe(TINY, overrides)
    with pytest.raises(ConfigError, match=r"batch\.micro.*coteaching(_incv)?\.rank to eval_first") as refusal:
        check_rows(recipe, world)
    assert f"at least {rows}" in str(refusal.value)
    check_rows(load_recipe(TINY, [*overrides, f"batch.micro={rows}"]), world)
    check_rows(load_recipe(TINY, [*overrides, "coteaching.rank=eval_first"]), world)
    check_rows(load_recipe(TINY, [*overrides, "methods=[standard]"]), world)


def test_a_dry_run_finds_it_without_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = describe_plan(load_recipe(TINY, ["batch.micro=8"]), "tiny", tmp_path / "run")
    assert "would be refused: batch.micro is 8" in plan
    split = describe_plan(
        load_recipe(TINY, ["batch.micro=8", "coteaching.rank=eval_first"]), "tiny", tmp_path / "run"
    )
    assert "would be refused" not in split


def test_a_start_records_the_rows_of_its_batchnorm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["batch.micro=10", "coteaching.rank=eval_first", "execution.threads=1"]
    assert run_recipe(load_recipe(TINY, overrides), "tiny", tmp_path / "run", only="labels") == 0
    (start,) = json.loads((tmp_path / "run" / "manifest.json").read_text())["starts"]
    assert start["batchnorm_rows"] == {"incv": 8, "methods": 8}
