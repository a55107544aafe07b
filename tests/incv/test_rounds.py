"""Algorithm 2 end to end on a few digits: files written, early end, refusals, repeatability."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import trainer.methods.inputs
from shards.errors import ConfigError, DataError
from tests.support.digits_bench import Bench
from trainer.acceleration.policy import Acceleration, choose_acceleration
from trainer.config.schema import Recipe
from trainer.distributed.world import World
from trainer.incv.predictions import Predictions
from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.batch import Batch, BatchRequest, Loader
from trainer.records.run_directory import RunDirectory
from trainer.training.checkpoint import find_newest_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Unreliable:
    """A loader that cannot read some samples, and counts the passes it is asked for."""

    loader: Loader
    lost: frozenset[int] = frozenset()
    passes: list[set[int]] = field(default_factory=list)

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        requests = list(requests)
        self.passes.append({int(sample) for request in requests for sample in request.ids})
        for batch in self.loader.batches(requests):
            unreadable = torch.tensor([int(sample) in self.lost for sample in batch.ids])
            batch.weights[unreadable] = 0
            yield batch

    def close(self) -> None:
        self.loader.close()


def newest_step(fold: Path) -> int:
    newest = find_newest_checkpoint(fold / "checkpoints")
    assert newest is not None
    return newest[0]


def written(run: RunDirectory) -> dict:
    return json.loads(run.incv.read_text())


def test_the_run_leaves_what_the_rounds_decided(bench: Bench):
    recipe = bench.recipe("incv.rounds=2", "incv.epochs=3", "incv.remove_ratio=0.5", "incv.noise_estimate=paper")
    data = bench.data(recipe)
    run = bench.run(recipe, data)
    content, final = written(run), SelectionIndex.read(run.selection)
    assert content["selection_checksum"] == final.checksum()
    assert content["ended_early"] is None
    assert content["filled_classes"] == []
    assert SelectionIndex.read(run.round_selection(1)).checksum() == final.checksum()
    np.testing.assert_array_equal(np.flatnonzero(final.state != State.OUTSIDE), data.ids)
    first, second = (Predictions.read(run.round_predictions(number)) for number in (0, 1))
    for record, predictions in zip(content["rounds"], (first, second), strict=True):
        assert record["predicted"] == len(predictions.sample_id)
        assert record["agreement_each"] == [predictions.of_fold(fold).agreement() for fold in (0, 1)]
        assert record["remove_ratio"] == 0.5
        assert record["network"] == "last"
    selected = np.concatenate([p.sample_id[p.predicted == data.labels[p.sample_id]] for p in (first, second)])
    np.testing.assert_array_equal(final.ids(State.SELECTED), np.sort(selected))


def test_one_half_is_judged_as_in_a_round_of_both(bench: Bench):
    data = bench.data(bench.recipe())
    both, one = (bench.run(bench.recipe("incv.epochs=3", f"incv.halves={halves}"), data) for halves in (2, 1))
    assert not (one.round(0) / "fold1").exists()
    whole, half = (Predictions.read(run.round_predictions(0)) for run in (both, one))
    expected = whole.of_fold(0)
    for column in Predictions.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(half, column), getattr(expected, column))
    found = SelectionIndex.read(one.selection)
    np.testing.assert_array_equal(np.flatnonzero(found.state != State.OUTSIDE), np.sort(expected.sample_id))
    np.testing.assert_array_equal(found.ids(State.SELECTED), np.sort(expected.sample_id[expected.agrees]))
    (record,) = written(one)["rounds"]
    assert (record["agreement"], record["agreement_each"]) == (expected.agreement(), [expected.agreement()])


@pytest.mark.parametrize("folds", [3, 4])
def test_each_fold_trains_on_all_parts_but_the_one_it_judges(bench: Bench, folds: int):
    recipe = bench.recipe("incv.rounds=2", "incv.epochs=3", f"incv.folds={folds}")
    data = bench.data(recipe)
    loader = Unreliable(data.loader)
    run = bench.run(recipe, replace(data, loader=loader))
    everything, selected = set(data.ids.tolist()), set()
    for number, record in enumerate(written(run)["rounds"]):
        whole = Predictions.read(run.round_predictions(number))
        judged = [set(whole.of_fold(fold).sample_id.tolist()) for fold in range(folds)]
        assert max(map(len, judged)) - min(map(len, judged)) <= 1
        candidates = set.union(*judged)
        assert sum(map(len, judged)) == len(candidates) == len(whole.sample_id)
        assert record["agreement_each"] == [whole.of_fold(fold).agreement() for fold in range(folds)]
        trained, predicted = loader.passes[2 * folds * number :][: 2 * folds : 2], loader.passes[2 * folds * number :]
        assert predicted[1 : 2 * folds : 2] == judged
        assert trained == [(selected | candidates) - part for part in judged]
        index = SelectionIndex.read(run.round_selection(number))
        assert not number or candidates < everything
        selected = set(index.ids(State.SELECTED).tolist())
    assert len(loader.passes) == 2 * folds * 2


def test_more_folds_are_for_both_halves(bench: Bench):
    with pytest.raises(ConfigError, match=r"set folds to 2, or halves to 2"):
        bench.recipe("incv.halves=1", "incv.folds=3")


def test_fewer_candidates_than_folds_are_refused(bench: Bench):
    recipe = bench.recipe("incv.folds=5")
    data = bench.data(recipe)
    with pytest.raises(DataError, match=r"4 usable sample.*5 folds.*at least 5"):
        bench.run(recipe, replace(data, ids=data.ids[:4]))


def test_one_half_is_for_one_round(bench: Bench):
    with pytest.raises(ConfigError, match=r"set rounds to 1, or halves to 2"):
        bench.recipe("incv.rounds=2", "incv.halves=1")


def test_predictions_do_not_depend_on_the_size_of_their_batches(bench: Bench):
    """execution.predict_batch is no result key: nor are the epoch that judges best and the selection that follows."""
    found = []
    for rows in (7, 256):
        recipe = bench.recipe("incv.epochs=3", "incv.round_network=best", f"execution.predict_batch={rows}")
        run = bench.run(recipe, bench.data(recipe))
        found.append((Predictions.read(run.round_predictions(0)), SelectionIndex.read(run.selection).checksum()))
    (small, selected), (large, selected_too) = found
    for column in ("sample_id", "fold", "predicted", "agrees", "status"):
        np.testing.assert_array_equal(getattr(small, column), getattr(large, column))
    for column in ("loss", "given_probability", "predicted_probability"):
        np.testing.assert_allclose(getattr(small, column), getattr(large, column), rtol=1e-4, atol=1e-6)
    assert selected == selected_too


def test_the_noise_is_estimated_in_round_1_and_kept(bench: Bench):
    recipe = bench.recipe("incv.epochs=3")
    data = bench.data(recipe)
    one = written(bench.run(recipe, data))["noise"]
    two = written(bench.run(bench.recipe("incv.epochs=3", "incv.rounds=2"), data))["noise"]
    assert one == two


def test_incv_ends_early_where_fewer_than_two_candidates_are_left(bench: Bench):
    recipe = bench.recipe("incv.rounds=3", "incv.remove_ratio=1000")  # each half removes all it does not select
    run = bench.run(recipe, bench.data(recipe))
    assert len(written(run)["rounds"]) == 1
    assert "after 1 of 3 rounds: too few candidates are left, 0" in written(run)["ended_early"]
    assert len(SelectionIndex.read(run.selection).ids(State.CANDIDATE)) == 0
    assert not run.round(1).exists()


def test_classes_with_few_selected_samples_are_filled_and_named(bench: Bench):
    least = 12
    recipe = bench.recipe(f"incv.min_per_class={least}")
    data = bench.data(recipe)
    run = bench.run(recipe, data)
    before, after = (SelectionIndex.read(path) for path in (run.round_selection(0), run.selection))
    counts = np.bincount(data.labels[before.ids(State.SELECTED)], minlength=10)
    available = np.bincount(data.labels[data.ids], minlength=10)
    assert (counts < least).any()
    filled = np.bincount(data.labels[after.ids(State.SELECTED)], minlength=10)
    np.testing.assert_array_equal(filled, np.maximum(counts, np.minimum(least, available)))
    named = {record["class"]: record["filled"] for record in written(run)["filled_classes"]}
    assert named == {label: filled[label] - counts[label] for label in np.flatnonzero(counts < least)}


def test_unreadable_samples_are_set_aside_and_seen_no_more(bench: Bench):
    recipe = bench.recipe("incv.rounds=2", "incv.max_unusable=0.02")
    data = bench.data(recipe)
    lost = frozenset(int(sample) for sample in data.ids[[3, 77, 150]])
    loader = Unreliable(data.loader, lost)
    run = bench.run(recipe, replace(data, loader=loader))
    index = SelectionIndex.read(run.selection)
    assert set(index.ids(State.UNREADABLE).tolist()) == lost
    assert written(run)["rounds"][0]["unusable"] == 3
    assert len(loader.passes) == 8
    for first_round in loader.passes[:4]:
        assert lost & first_round
    for second_round in loader.passes[4:]:
        assert not lost & second_round


def test_a_short_round_is_accelerated_as_the_first_one_is(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The blocks are compiled already: that few steps are left is no reason against using them."""
    asked: list[int] = []

    def spy(recipe: Recipe, steps: int, world: World, allow_accelerate: bool) -> Acceleration:
        asked.append(steps)
        return choose_acceleration(recipe, steps, world, allow_accelerate)

    monkeypatch.setattr(trainer.methods.inputs, "choose_acceleration", spy)
    recipe = bench.recipe("incv.rounds=2", "incv.epochs=3", "incv.remove_ratio=2", "batch.global=8")
    data = bench.data(recipe)
    run = bench.run(recipe, data)
    steps = {fold: newest_step(run.fold(*fold)) for fold in product(range(2), range(2))}
    assert steps[1, 0] < steps[0, 0]
    assert asked == [steps[0, 0]] * 4


def test_too_many_unreadable_samples_end_the_run(bench: Bench):
    recipe = bench.recipe("incv.max_unusable=0.01")
    data = bench.data(recipe)
    loader = Unreliable(data.loader, frozenset(int(sample) for sample in data.ids[:3]))
    with pytest.raises(DataError, match=r"1\.5%.*incv\.max_unusable = 1\.0%"):
        bench.run(recipe, replace(data, loader=loader))


def test_no_candidates_are_refused(bench: Bench):
    recipe = bench.recipe()
    data = bench.data(recipe)
    with pytest.raises(DataError, match=r"1 usable sample.*at least 2"):
        bench.run(recipe, replace(data, ids=data.ids[:1]))


def test_a_finished_run_is_not_trained_again(bench: Bench):
    recipe = bench.recipe("incv.rounds=2")
    data = bench.data(recipe)
    first = bench.run(recipe, data)
    checksum = SelectionIndex.read(first.selection).checksum()
    first.selection.unlink()
    content = first.incv.read_bytes()
    first.incv.unlink()
    loader = Unreliable(data.loader)
    again = bench.run(recipe, replace(data, loader=loader), first.root)
    assert loader.passes == []
    assert SelectionIndex.read(again.selection).checksum() == checksum
    assert again.incv.read_bytes() == content


def test_a_fold_that_is_done_is_kept_and_the_other_trained(bench: Bench):
    """A resume may find one fold done: only the other is trained and judged, with the same result."""
    recipe = bench.recipe()
    data = bench.data(recipe)
    run = bench.run(recipe, data)
    whole = Predictions.read(run.round_predictions(0))
    run.round_predictions(0).unlink()
    for path in sorted(run.fold(0, 1).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    loader = Unreliable(data.loader)
    bench.run(recipe, replace(data, loader=loader), run.root)
    held_out = set(whole.of_fold(1).sample_id.tolist())
    assert loader.passes == [set(data.ids.tolist()) - held_out, held_out]
    again = Predictions.read(run.round_predictions(0))
    for name in Predictions.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


@pytest.mark.parametrize(("network", "count"), [("last", 2), ("best", 2), ("last", 3)])
def test_folds_side_by_side_in_one_process_are_those_in_turn(bench: Bench, network: str, count: int):
    """Bit for bit: the weights of every fold, and with them predictions and selection."""
    said = ("incv.rounds=2", "incv.epochs=2", f"incv.round_network={network}", f"incv.folds={count}")
    runs = []
    for folds in ("in_turn", "side_by_side"):
        recipe = bench.recipe(*said, f"execution.folds={folds}")
        runs.append(bench.run(recipe, bench.data(recipe)))
    assert written(runs[0]) == written(runs[1])
    for number, fold in product(range(2), range(count)):
        (step, ours), (other, theirs) = (
            find_newest_checkpoint(run.fold(number, fold) / "checkpoints") for run in runs
        )
        assert step == other
        assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())
