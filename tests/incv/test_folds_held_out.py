"""Held-out samples stay held out: real trainings on digits, checked by the files written and ids requested."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.support.digits_bench import Bench, network_of, same
from tests.support.prediction_rows import rows
from tests.support.toy_networks import TARGETS, schedule_of
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import Recipe
from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.folds import FoldTask
from trainer.incv.predictions import Predictions
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.loading.epoch_plan import StepIds
from trainer.loading.image_set import ImageSet
from trainer.methods.task import TaskSettings
from trainer.models.factory import create_model
from trainer.training.checkpoint import TrainState

pytestmark = pytest.mark.usefixtures("one_thread")
few_examples = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- labels of the held-out half


@dataclass(frozen=True)
class Unchanged:
    """A run with the labels as they are; held_out[f]: the ids that fold f judged, and so did not train on."""

    recipe: Recipe
    data: ImageSet
    networks: list[dict[str, torch.Tensor]]
    held_out: list[np.ndarray]


@pytest.fixture(scope="module")
def unchanged(bench: Bench) -> Unchanged:
    recipe = bench.recipe()
    data = bench.data(recipe)
    run = bench.run(recipe, data)
    predictions = Predictions.read(run.round_predictions(0))
    held_out = [predictions.of_fold(fold).sample_id for fold in (0, 1)]
    return Unchanged(recipe, data, [network_of(run, 0, fold) for fold in (0, 1)], held_out)


def networks_after(bench: Bench, unchanged: Unchanged, ids: Iterable[int], shift: int) -> list[dict]:
    """Both folds' networks where the labels of `ids` are moved on by `shift` classes."""
    labels = unchanged.data.labels.copy()
    ids = np.array(list(ids))
    labels[ids] = (labels[ids] + shift) % unchanged.data.classes
    run = bench.run(unchanged.recipe, replace(unchanged.data, labels=labels))
    return [network_of(run, 0, fold) for fold in (0, 1)]


def test_the_two_halves_are_all_samples_of_the_run(unchanged):
    every = np.concatenate(unchanged.held_out)
    np.testing.assert_array_equal(np.sort(every), unchanged.data.ids)
    assert [len(half) for half in unchanged.held_out] == [100, 100]


def test_the_same_labels_give_the_same_networks(bench, unchanged):
    again = networks_after(bench, unchanged, unchanged.data.ids, shift=0)
    assert same(again[0], unchanged.networks[0])
    assert same(again[1], unchanged.networks[1])


@few_examples
@given(st.data(), st.integers(0, 1), st.integers(1, 9))
def test_changing_labels_of_the_held_out_half_changes_nothing_and_of_the_other_half_everything(
    bench, unchanged, data, fold, shift
):
    half = [int(sample) for sample in unchanged.held_out[fold]]
    changed = data.draw(st.lists(st.sampled_from(half), min_size=1, max_size=len(half), unique=True))
    networks = networks_after(bench, unchanged, changed, shift)
    assert same(networks[fold], unchanged.networks[fold])
    assert not same(networks[1 - fold], unchanged.networks[1 - fold])


@few_examples
@given(st.data(), st.integers(0, 1), st.integers(1, 9))
def test_changing_one_label_of_the_training_half_changes_the_network(bench, unchanged, data, fold, shift):
    trained_on = unchanged.held_out[1 - fold]
    changed = data.draw(st.sampled_from([int(sample) for sample in trained_on]))
    networks = networks_after(bench, unchanged, [changed], shift)
    assert not same(networks[fold], unchanged.networks[fold])
    assert same(networks[1 - fold], unchanged.networks[1 - fold])


# --- ids of every fold


@dataclass
class Watched:
    """A loader that notes what each pass asks for."""

    loader: Loader
    passes: list[tuple[str, np.ndarray]] = field(default_factory=list)

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        requests = list(requests)
        kind = "train" if requests[0].fill_with_images else "predict"
        ids = np.concatenate([request.ids[: request.real_rows] for request in requests])
        self.passes.append((kind, ids))
        return self.loader.batches(requests)

    def close(self) -> None:
        self.loader.close()


def test_each_fold_trains_on_s_and_its_half_and_judges_the_other_half(bench):
    """Two rounds: S of round 1 is trained on by both folds and judged by none; removed samples are seen no more."""
    recipe = bench.recipe("incv.rounds=2", "incv.epochs=3", "incv.remove_ratio=0.5")
    data = bench.data(recipe)
    loader = Watched(data.loader)
    run = bench.run(recipe, replace(data, loader=loader))
    assert [kind for kind, _ in loader.passes] == ["train", "predict"] * 4
    for number in (0, 1):
        selected, candidates = np.empty(0, np.int64), data.ids
        if number:
            before = SelectionIndex.read(run.round_selection(number - 1))
            selected, candidates = before.ids(State.SELECTED), before.ids(State.CANDIDATE)
            assert len(selected)
            assert len(before.ids(State.REMOVED))
        judged = []
        for fold in (0, 1):
            (_, trained_on), (_, held_out) = loader.passes[4 * number + 2 * fold :][:2]
            seen, times = np.unique(trained_on, return_counts=True)
            assert set(times.tolist()) == {3}  # every epoch, once
            expected = np.concatenate([selected, np.setdiff1d(candidates, held_out)])
            np.testing.assert_array_equal(seen, np.sort(expected))
            judged.append(held_out)
        assert abs(len(judged[0]) - len(judged[1])) <= 1
        np.testing.assert_array_equal(np.sort(np.concatenate(judged)), candidates)


# --- first weights


def first_weights(bench: Bench, init: str, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Parameters of four folds that were trained at a rate of next to nothing: those they began with."""
    rate = "incv.optimizer={kind: sgd, learning_rate: 1e-30, momentum: 0.0}"
    recipe = bench.recipe(
        rate, f"incv.init={init}", f"seed={seed}", "incv.rounds=2", "incv.epochs=1", "incv.remove_ratio=0"
    )
    run = bench.run(recipe, bench.data(recipe))
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    folds = [network_of(run, round_, fold) for round_ in (0, 1) for fold in (0, 1)]
    return [{name: tensor for name, tensor in network.items() if not name.endswith(buffers)} for network in folds]


def weights_are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-20) for name in one)


def test_init_same_starts_all_folds_of_all_rounds_from_equal_weights(bench):
    folds = first_weights(bench, "same")
    assert all(weights_are_equal(folds[0], other) for other in folds[1:])
    assert not weights_are_equal(folds[0], first_weights(bench, "same", seed=1)[0])


def test_init_fresh_starts_every_fold_of_every_round_from_its_own(bench):
    folds = first_weights(bench, "fresh")
    for place, one in enumerate(folds):
        assert not any(weights_are_equal(one, other) for other in folds[place + 1 :])


# --- the network that judges


def test_best_judges_by_the_first_epoch_of_highest_agreement(bench):
    """An epoch's network is that of a run of so many epochs with `last`: no other code computes the expectation."""
    epochs = 5
    rate = "incv.optimizer.learning_rate=0.02"  # high, so that agreement goes up and down
    data = bench.data(bench.recipe())
    lasts = [bench.run(bench.recipe(f"incv.epochs={count}", rate), data) for count in range(1, epochs + 1)]
    best = bench.run(bench.recipe(f"incv.epochs={epochs}", rate, "incv.round_network=best"), data)
    by_epoch = [Predictions.read(run.round_predictions(0)) for run in lasts]
    found = Predictions.read(best.round_predictions(0))
    for fold in (0, 1):
        # looking at the held-out half after every epoch does not disturb the training
        assert same(network_of(best, 0, fold), network_of(lasts[-1], 0, fold))
        agreements = [predictions.of_fold(fold).agreement() for predictions in by_epoch]
        expected = by_epoch[int(np.argmax(agreements))].of_fold(fold)
        assert len(set(agreements)) > 1
        for name in Predictions.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(found.of_fold(fold), name), getattr(expected, name))


class ScriptedJudge:
    """Answers with the agreements it was given, in turn, and remembers the network it was shown."""

    def __init__(self, tenths: list[int]) -> None:
        self._answers = iter(tenths)
        self.shown: list[dict[str, torch.Tensor]] = []

    def __call__(self, network: torch.nn.Module) -> Predictions:
        self.shown.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
        return rows(np.arange(10), np.arange(10) < next(self._answers))


def fold_task(judge: Callable[[torch.nn.Module], Predictions] | None) -> FoldTask:
    optimizer = OptimizerConfig(kind="adam", learning_rate=0.01)
    return FoldTask(
        create_model("digits_cnn", 10, seed=5),
        TaskSettings(optimizer, schedule_of(1), TARGETS, SINGLE_PROCESS),
        judge,
    )


def train_epochs(task: FoldTask, epochs: Iterable[int]) -> None:
    """One step an epoch, on made-up digits."""
    for epoch in epochs:
        generator = torch.Generator().manual_seed(epoch)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        task.step(Batch(torch.arange(8), images, torch.ones(8)), step_at(epoch))
        for work in task.after_epoch(epoch):
            work()


def step_at(epoch: int) -> StepIds:
    return StepIds(epoch, epoch, (np.arange(8),))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_the_first_of_equally_agreeing_epochs_is_kept(tenths):
    judge = ScriptedJudge(tenths)
    task = fold_task(judge)
    train_epochs(task, range(len(tenths)))
    best = tenths.index(max(tenths))
    assert (task.best_epoch, task.best_agreement) == (best, max(tenths) / 10)
    assert same(task.round_network().state_dict(), judge.shown[best])


def through_files(state: TrainState) -> TrainState:
    """As a checkpoint keeps it: tensors as safetensors, the rest as JSON."""
    return TrainState(load(save(state.tensors)), json.loads(json.dumps(state.values)))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=5), st.data())
def test_the_best_epoch_survives_a_restart(tenths, data):
    """After any epoch, into a task that has seen nothing."""
    judge = ScriptedJudge(tenths)
    uninterrupted = fold_task(judge)
    train_epochs(uninterrupted, range(len(tenths)))

    stop = data.draw(st.integers(1, len(tenths) - 1))
    before = fold_task(ScriptedJudge(tenths[:stop]))
    train_epochs(before, range(stop))
    after = fold_task(ScriptedJudge(tenths[stop:]))
    after.load(through_files(before.state()))
    train_epochs(after, range(stop, len(tenths)))
    assert (after.best_epoch, after.best_agreement) == (uninterrupted.best_epoch, uninterrupted.best_agreement)
    assert same(after.round_network().state_dict(), uninterrupted.round_network().state_dict())
    assert same(after.module.state_dict(), judge.shown[tenths.index(max(tenths))])


def test_without_a_judge_the_last_network_judges():
    task = fold_task(None)
    train_epochs(task, range(3))
    last = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    assert same(task.round_network().state_dict(), last)
    other = fold_task(None)
    other.load(task.state())
    assert same(other.round_network().state_dict(), last)
