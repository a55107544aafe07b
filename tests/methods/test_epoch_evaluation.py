"""Evaluation every few epochs: the best weights beside the last, patience, state, and whole runs that end early."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from shards.sample_index import SampleIndex
from tests.support import RECIPES, processes
from tests.support.command_line import exit_code
from tests.support.toy_networks import assert_same_network, batch_of, normed, setting, step_at
from tests.support.untimed import untimed
from trainer.config.optimisation import EvaluationConfig
from trainer.distributed.stop import Stopped
from trainer.loading.image_set import open_image_set
from trainer.methods.epoch_evaluation import Accuracy, BestEpoch, EvaluatedTask
from trainer.methods.standard import StandardTask
from trainer.passes.sample_pass import SamplePass
from trainer.records.stored_labels import read_labels
from trainer.run.export import load_network
from trainer.run.recipe import load_recipe
from trainer.training.checkpoint import read_checkpoint

CPU = torch.device("cpu")

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), min_size=1, max_size=30))
def test_the_best_epoch_is_the_first_with_the_highest_accuracy(accuracies: list[float]) -> None:
    best = BestEpoch()
    for epoch, accuracy in enumerate(accuracies):
        best = best.after(epoch, accuracy)
    assert best.accuracy == max(accuracies)
    assert best.epoch == accuracies.index(max(accuracies))
    assert best.waited == len(accuracies) - 1 - best.epoch


class Told:
    """Accuracies told in advance; keeps the networks that it was shown."""

    def __init__(self, *accuracies: float) -> None:
        self.left, self.shown = list(accuracies), list[nn.Module]()

    def __call__(self, networks: Sequence[nn.Module]) -> dict[str, Accuracy]:
        (network,) = networks
        self.shown.append(copy.deepcopy(network))
        return {"val": Accuracy.of_hits([100 * self.left.pop(0)], 100), "test": Accuracy.of_hits([3], 6)}


def trained(task: EvaluatedTask, epochs: range) -> None:
    for epoch in epochs:
        task.step(batch_of(8, seed=epoch), step_at(8, step=epoch))
        for work in task.after_epoch(epoch):
            work()


def task_of(measure: Told, epochs: int = 9, seed: int = 1, **keys: object) -> EvaluatedTask:
    config = EvaluationConfig(**{"every": 1, "choose_on": "val", **keys})  # type: ignore[arg-type]
    return EvaluatedTask(StandardTask(normed(seed), setting(ema_decay=0.5, epochs=epochs)), config, measure)


def test_the_weights_of_the_best_epoch_are_kept_beside_the_last() -> None:
    measure = Told(0.2, 0.6, 0.6, 0.1)
    task = task_of(measure)
    trained(task, range(4))
    assert task.epoch_metrics == {"accuracy.val": 0.1, "accuracy.test": 0.5}
    tensors = task.state().tensors
    for name, tensor in measure.shown[1].state_dict().items():
        assert torch.equal(tensors[f"best.{name}"], tensor), name
    assert not torch.equal(tensors["best.0.weight"], tensors["model.0.weight"])


def test_evaluations_come_every_few_epochs_and_after_the_last() -> None:
    measure = Told(*[0.5] * 3)
    task = task_of(measure, epochs=5, every=2)
    seen = []
    for epoch in range(5):
        trained(task, range(epoch, epoch + 1))
        seen.append(bool(task.epoch_metrics))
    assert seen == [False, True, False, True, True]


def test_the_accuracy_of_each_network_of_a_pair_is_recorded() -> None:
    accuracies = {"val": Accuracy.of_hits([4, 7], 20), "test": Accuracy.of_hits([0, 0], 0)}
    config = EvaluationConfig(every=1, choose_on="val")
    task = EvaluatedTask(StandardTask(normed(1), setting(epochs=2)), config, lambda networks: accuracies)
    trained(task, range(1))
    assert task.epoch_metrics == {
        "accuracy.val": 0.275,
        "accuracy_a.val": 0.2,
        "accuracy_b.val": 0.35,
        **{f"{name}.test": 0.0 for name in ("accuracy", "accuracy_a", "accuracy_b")},
    }
    assert task.best.accuracy == 0.275


@pytest.mark.parametrize(("patience", "ends"), [(0, None), (1, 2), (2, 5), (3, None)])
def test_patience_counts_evaluations_without_a_better_one(patience: int, ends: int | None) -> None:
    measure = Told(0.1, 0.3, 0.2, 0.4, 0.4, 0.4)
    task = task_of(measure, patience=patience)
    for epoch in range(6):
        trained(task, range(epoch, epoch + 1))
        assert task.has_ended == (ends is not None and epoch >= ends)
        if task.has_ended:
            break


def test_without_a_set_to_choose_on_nothing_is_kept() -> None:
    task = task_of(Told(0.1, 0.3), choose_on=None)
    trained(task, range(2))
    assert task.epoch_metrics["accuracy.val"] == 0.3
    assert not any(name.startswith("best.") for name in task.state().tensors)


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    first = task_of(Told(0.5, 0.4, 0.3, 0.2), patience=3)
    trained(first, range(2))
    saved = first.state()
    saved.tensors = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    saved.values = json.loads(json.dumps(saved.values))
    second = task_of(Told(0.3, 0.2), patience=3, seed=7)
    second.load(saved)
    for task in (first, second):
        trained(task, range(2, 4))
        assert task.has_ended
    assert first.best == second.best == BestEpoch(0.5, 0, 3)
    for name, tensor in first.state().tensors.items():
        assert torch.equal(tensor, second.state().tensors[name]), name


KEYS = (
    "methods=[standard]",
    "incv=null",
    "standard.epochs=30",
    "execution.threads=1",
    "execution.checkpoint_every=7",
)
CHOOSING = ("evaluation={every: 1, choose_on: test, patience: 2}", "standard.optimizer={learning_rate: 0.02}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choosing")
    processes.pack_digits(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "run", *KEYS, *CHOOSING]) == 0
    return folder / "run"


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in untimed(run / "methods/standard/metrics.jsonl").splitlines()]


def test_a_run_ends_early_and_uses_its_best_epoch(run: Path) -> None:
    lines = [line for line in metrics_of(run) if "accuracy.test" in line]
    accuracies = [line["accuracy.test"] for line in lines]
    best = accuracies.index(max(accuracies))
    assert len(accuracies) == best + 3 < 30
    assert lines[-1]["step"] == len(accuracies) * 10  # 300 samples, 32 rows
    assert json.loads((run / "methods/standard/training.json").read_text())["best"]["epoch"] == best
    counts = json.loads((run / "evaluation.json").read_text())["test"]["standard"]
    assert counts["networks"][0]["top1"] / counts["count"] == accuracies[best]
    saved = read_checkpoint(max((run / "methods/standard/checkpoints").glob("step-*"))).tensors
    exported = load_file(run / "methods/standard/export/model_a/model.safetensors")
    assert all(torch.equal(tensor, saved[f"best.{name}"]) for name, tensor in exported.items())


def test_the_fit_to_given_and_true_labels_is_measured(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    keys = ["evaluation={every: 2, training_labels: true}", "standard.epochs=3"]
    assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "fit", *KEYS, *keys]) == 0
    lines = [line for line in metrics_of(Path("fit")) if "accuracy.train_given" in line]
    assert [line["epoch"] for line in lines] == [2, 3]
    recipe = load_recipe(Path("fit/config.resolved.yaml"))
    index = SampleIndex.load(Path(recipe.data.train.shards))
    given, true = (read_labels(Path("fit", file)) for file in ("labels.parquet", "true_labels.parquet"))
    data = open_image_set(index, given.ids, given.by_id(len(index)), recipe.image, recipe.execution, CPU)
    (batch,) = data.loader.batches(data.predict_requests(given.ids, len(given.ids)))
    found = load_network("fit/methods/standard/export/model_a")(batch.images).argmax(dim=1).numpy()
    ids = batch.ids.numpy()
    for name, labels in (("given", given), ("true", true)):
        share = np.mean(found == labels.by_id(len(index))[ids])
        assert lines[-1][f"accuracy.train_{name}"] == pytest.approx(share, abs=1e-6)
    assert lines[-1]["accuracy.train_given"] != lines[-1]["accuracy.train_true"]


def test_the_report_marks_the_set_that_was_used_for_choosing(run: Path) -> None:
    assert json.loads((run / "report.json").read_text())["chosen_on"] == "test"
    assert "test was used for choosing" in (run / "report.html").read_text()


def test_a_finished_run_trains_no_more_and_other_choices_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    before = metrics_of(run)
    command = ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "run", *KEYS]
    assert exit_code([*command, *CHOOSING]) == 0
    assert metrics_of(run) == before
    assert exit_code([*command, *CHOOSING, "evaluation.patience=3"]) == 2
    assert "evaluation.patience (2 -> 3)" in capsys.readouterr().err
    assert exit_code([*command, *CHOOSING, "data.eval.test.limit=50"]) == 2
    assert "--redo standard" in capsys.readouterr().err


def test_an_ended_training_that_was_not_recorded_as_done_is_not_continued(run: Path, monkeypatch) -> None:
    """As if the run had been killed after the last checkpoint."""
    monkeypatch.chdir(run.parent)
    manifest = run / "manifest.json"
    content = json.loads(manifest.read_text())
    content["stages"]["standard"]["state"] = "running"
    manifest.write_text(json.dumps(content))
    before = metrics_of(run)
    assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "run", *KEYS, *CHOOSING]) == 0
    assert metrics_of(run) == before


@pytest.mark.parametrize("before_the_end", [0, 2])
def test_a_stop_inside_an_evaluation_changes_nothing(run: Path, before_the_end: int, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    evaluations = sum("accuracy.test" in line for line in metrics_of(run))
    command = ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", f"stopped{before_the_end}", *KEYS, *CHOOSING]
    calls, run_pass = [], SamplePass.run

    def stopping(self: SamplePass, *arguments: Any, **keys: Any) -> Any:
        calls.append(arguments)
        if len(calls) == evaluations - before_the_end:
            raise Stopped("evaluation", 0, "SIGTERM")
        return run_pass(self, *arguments, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(SamplePass, "run", stopping)
        assert exit_code(command) == 75
    assert exit_code(command) == 0
    resumed = run.parent / f"stopped{before_the_end}"
    assert metrics_of(resumed) == metrics_of(run)
    for name in ("tensors.safetensors", "state.json"):
        ours, theirs = (max((each / "methods/standard/checkpoints").glob("step-*")) / name for each in (resumed, run))
        assert ours.parent.name == theirs.parent.name
        assert ours.read_bytes() == theirs.read_bytes(), name
    for file in ("evaluation.json", "methods/standard/export/model_a/model.safetensors"):
        assert (resumed / file).read_bytes() == (run / file).read_bytes(), file


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["evaluation={choose_on: test}"], "evaluation.every"),
        (["evaluation={training_labels: true}"], "evaluation.every"),
        (["evaluation={every: 1, patience: 1}"], "evaluation.choose_on"),
        (["evaluation={every: 1, choose_on: tset}"], "choose one of test"),
        (["evaluation={every: 1}", "data.eval={}"], "data.eval_fraction"),
    ],
)
def test_what_cannot_be_is_refused(keys: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["validate", "-c", str(RECIPES / "tiny.yaml"), *keys]) == 2
    assert words in capsys.readouterr().err


def test_the_average_is_what_is_judged() -> None:
    measure = Told(0.5)
    task = task_of(measure)
    trained(task, range(1))
    with task._task.averaged_weights():
        assert_same_network(measure.shown[0], task._task.module, atol=0)
