"""Held out means held out: real trainings on real digits, seen from the files they leave and the ids they ask for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prediction_rows import rows

from shards.sample_index import SampleIndex
from trainer.checkpoint import Checkpointer, TrainState
from trainer.config import OptimizerConfig, Recipe
from trainer.incv.folds import FoldTask
from trainer.incv.predictions import Predictions
from trainer.incv.rounds import Incv
from trainer.incv.selection_index import SelectionIndex, State
from trainer.labels import make_labels
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.loading.image_set import ImageSet, limited_ids, open_image_set
from trainer.loading.sample_order import StepIds
from trainer.manifest import Manifest
from trainer.models import create_model
from trainer.recipe_file import load_recipe
from trainer.run_directory import RunDirectory
from trainer.stop_request import StopRequest
from trainer.train_loop import Surroundings
from trainer.world import join_world

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
KEYS = (
    "data.train.limit=200",
    "incv.rounds=1",
    "incv.epochs=2",
    "incv.round_network=last",
    "incv.optimizer.milestones=[]",
    "execution.threads=1",
    "execution.device=cpu",
)
few_examples = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass(frozen=True)
class Bench:
    """Digits with noisy labels, and runs of Algorithm 2 over them in folders of their own."""

    index: SampleIndex
    new_folder: Callable[[], Path]

    def recipe(self, *overrides: str) -> Recipe:
        return load_recipe(TINY, [*KEYS, *overrides])

    def data(self, recipe: Recipe) -> ImageSet:
        ids = limited_ids(self.index, recipe.data.train.limit)
        dense = np.full(len(self.index), -1, np.int64)
        dense[ids] = make_labels(recipe.labels, recipe.seed, self.index, ids)[0]
        device = torch.device("cpu")
        return open_image_set(self.index, ids, dense, recipe.image, recipe.execution, device)

    def run(self, recipe: Recipe, data: ImageSet) -> RunDirectory:
        run = RunDirectory(self.new_folder())
        world, manifest = join_world(recipe.execution), Manifest(run)
        manifest.begin("tiny", world, recipe.batch.global_)
        Incv(recipe, data, run, Surroundings(world, recipe.execution, manifest, StopRequest(run.root))).run()
        return run


@pytest.fixture(scope="module")
def bench(packed_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(SampleIndex.load(packed_digits / "train"), lambda: tmp_path_factory.mktemp("run"))


def network_of(run: RunDirectory, round_: int, fold: int) -> dict[str, torch.Tensor]:
    """All tensors of the fold's last checkpoint that belong to its network."""
    found = Checkpointer(run.fold(round_, fold) / "checkpoints").newest()
    assert found is not None
    return {name: tensor for name, tensor in found[1].tensors.items() if name.startswith("model.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    assert one
    return all(torch.equal(one[name], other[name]) for name in one)


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
    torch.set_num_threads(1)
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
    by_epoch = []
    for count in range(1, epochs + 1):
        recipe = bench.recipe(f"incv.epochs={count}", rate)
        by_epoch.append(Predictions.read(bench.run(recipe, bench.data(recipe)).round_predictions(0)))
    recipe = bench.recipe(f"incv.epochs={epochs}", rate, "incv.round_network=best")
    found = Predictions.read(bench.run(recipe, bench.data(recipe)).round_predictions(0))
    for fold in (0, 1):
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
    return FoldTask(create_model("digits_cnn", 10, seed=5), optimizer, 1, torch.device("cpu"), "fp32", judge)


def train_epochs(task: FoldTask, epochs: Iterable[int]) -> None:
    """One step an epoch, on made-up digits."""
    for epoch in epochs:
        generator = torch.Generator().manual_seed(epoch)
        images = torch.randn(8, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (8,), generator=generator)
        task.step(Batch(torch.arange(8), images, labels, torch.ones(8)), step_at(epoch))
        task.end_epoch(epoch)


def step_at(epoch: int) -> StepIds:
    return StepIds(epoch, epoch, np.arange(8), np.empty(0, np.int64))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_the_first_of_equally_agreeing_epochs_is_kept(tenths):
    judge = ScriptedJudge(tenths)
    task = fold_task(judge)
    train_epochs(task, range(len(tenths)))
    best = tenths.index(max(tenths))
    assert (task.best_epoch, task.best_agreement) == (best, max(tenths) / 10)
    assert same(task.round_network().state_dict(), judge.shown[best])


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), min_size=2, max_size=5), st.data())
def test_the_best_epoch_survives_a_restart(tmp_path_factory, tenths, data):
    """Through a checkpoint on disk, after any epoch, into a task that has seen nothing."""
    judge = ScriptedJudge(tenths)
    uninterrupted = fold_task(judge)
    train_epochs(uninterrupted, range(len(tenths)))

    stop = data.draw(st.integers(1, len(tenths) - 1))
    before = fold_task(ScriptedJudge(tenths[:stop]))
    train_epochs(before, range(stop))
    checkpoints = Checkpointer(tmp_path_factory.mktemp("best") / "checkpoints")
    checkpoints.save(stop, before.state(), wait=True)
    checkpoints.close()
    step, state = checkpoints.newest() or (None, TrainState({}, {}))
    assert step == stop

    after = fold_task(ScriptedJudge(tenths[stop:]))
    train_epochs(fold_task(None), [0])
    after.load(state)
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


def test_judging_does_not_disturb_the_training():
    """Whether or not the held-out half is looked at after each epoch, the weights go the same way."""
    watched, alone = fold_task(ScriptedJudge([3, 1, 1])), fold_task(None)
    train_epochs(watched, range(3))
    train_epochs(alone, range(3))
    assert same(watched.module.state_dict(), alone.module.state_dict())
