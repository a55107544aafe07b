"""Whole runs of F-correction and D2L: what they record, what redoes them, and stops inside their predict passes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainer.methods.d2l
import trainer.run.stages
from shards.durable import read_json
from shards.sample_index import SampleIndex
from tests.support import RECIPES, processes
from tests.support.command_line import exit_code
from tests.support.untimed import untimed
from trainer.distributed.stop import Stopped
from trainer.loading.image_set import open_image_set
from trainer.methods.d2l import measure_lid
from trainer.methods.inputs import MethodInputs
from trainer.methods.networks import load_trained_networks
from trainer.passes.sample_pass import SamplePass
from trainer.records.stored_labels import read_labels
from trainer.run.recipe import load_recipe

METHODS = ("standard", "forward_correction", "d2l")
RATE = "optimizer: {kind: adam, learning_rate: 0.005}"
KEYS = (
    "methods=[standard, forward_correction, d2l]",
    "incv=null",
    "data.train.limit=96",
    "data.eval.test.limit=40",
    "batch.global=24",
    "standard.epochs=2",
    f"forward_correction={{epochs: 2, {RATE}}}",
    f"d2l={{epochs: 8, initial_epochs: 3, window: 2, neighbours: 5, lid_rows: 32, lid_batches: 2, {RATE}}}",
    "execution.threads=1",
    "execution.predict_batch=40",
)


def command(folder: str, *keys: str) -> list[str]:
    return ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", folder, *KEYS, *keys]


TURN = 4
"""The first epoch, counted from 0, whose LID is compared."""


def let_lid_rise(patch: pytest.MonkeyPatch) -> None:
    """Treble what is measured from an epoch on: whether the LID of so small a training rises, rounding decides."""

    def measure(inputs: MethodInputs, features: nn.Module, epoch: int) -> float | None:
        lid = measure_lid(inputs, features, epoch)
        return lid if lid is None or epoch < TURN else 3 * lid

    patch.setattr(trainer.methods.d2l, "measure_lid", measure)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    processes.pack_digits(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        let_lid_rise(patch)
        assert exit_code(command("run")) == 0
    return folder / "run"


def measured(run: Path) -> list[dict[str, Any]]:
    """The lines of D2L's metrics with a LID, one per epoch."""
    lines = (run / "methods/d2l/metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lid" in line]


def test_all_methods_are_evaluated_exported_and_reported(run: Path) -> None:
    assert set(read_json(run / "evaluation.json")["test"]) == set(METHODS)
    page = (run / "report.html").read_text()
    assert "F-correction" in page
    assert "D2L" in page
    assert all((run / "methods" / method / "export/model_a/model.safetensors").exists() for method in METHODS)


def test_t_is_that_of_the_network_of_standard(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    recipe = load_recipe(RECIPES / "tiny.yaml", KEYS)
    index, labels = SampleIndex.load(Path("data/shards/digits-train")), read_labels(run / "labels.parquet")
    data = open_image_set(
        index, labels.ids, labels.by_id(len(index)), recipe.image, recipe.execution, torch.device("cpu")
    )
    (network,) = load_trained_networks(recipe, "standard", 1, run / "methods/standard", index.num_classes)
    requests = data.predict_requests(labels.ids, 1000)
    with torch.no_grad():
        (batch,) = data.loader.batches(iter(requests))
        probabilities = network(batch.images).softmax(dim=1).numpy()
    order = np.argsort(batch.ids.numpy())
    ids, probabilities = batch.ids.numpy()[order], probabilities[order]
    facts = read_json(run / "methods/forward_correction/training.json")
    for column, row, anchor in zip(probabilities.T, facts["transition"], facts["anchors"], strict=True):
        limit = np.percentile(column, 97, method="higher")
        best = max(value for value in column if value < limit)
        place = int(np.searchsorted(ids, anchor))
        assert column[place] == pytest.approx(best, rel=1e-4)
        assert row == pytest.approx(probabilities[place], rel=1e-3, abs=1e-6)
        assert sum(row) == pytest.approx(1.0, abs=1e-12)
    data.close()


def test_d2l_measures_every_epoch_and_turns_once(run: Path) -> None:
    lines = measured(run)
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    lids = [line["lid"] for line in lines]
    for epoch, line in enumerate(lines):
        share = np.exp(-(epoch + 1) / 8 * lids[epoch] / min(lids[: epoch + 1])) if epoch >= TURN else 1.0
        assert line["alpha"] == pytest.approx(share, abs=1e-5)
    saved = read_json(max((run / "methods/d2l/checkpoints").glob("step-*")) / "state.json")["values"]
    assert saved["lid_history"]["turned_after"] == TURN + 1


def test_other_keys_of_standard_redo_f_correction(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    assert exit_code(command("run", "standard.epochs=3")) == 2
    said = capsys.readouterr().err
    assert "To redo standard, forward_correction, evaluate, export, add `--redo standard`" in said


def test_stops_inside_predict_passes_change_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside F-correction's pass, and when the LID is measured before, at and after the turning point."""
    monkeypatch.chdir(run.parent)
    let_lid_rise(monkeypatch)
    run_pass = SamplePass.run
    # Each start begins with the measurement in which the one before was stopped.
    for calls in (1, 3, TURN, 2):
        made: list[str] = []

        def stopping(
            self: SamplePass, *arguments: Any, made: list[str] = made, calls: int = calls, **keys: Any
        ) -> Any:
            made.append(self.place)
            if len(made) == calls:
                raise Stopped(self.place, 0, "SIGTERM")
            return run_pass(self, *arguments, **keys)

        with monkeypatch.context() as patch:
            patch.setattr(SamplePass, "run", stopping)
            assert exit_code(command("stopped")) == 75
    assert exit_code(command("stopped")) == 0
    stopped = run.parent / "stopped"
    starts = read_json(stopped / "manifest.json")["starts"]
    resumed = [start["resumed"].get("d2l") for start in starts]
    assert resumed == [None, None, 8, 4 * (TURN + 1), 4 * (TURN + 2)]
    for method in METHODS:
        for file in ("tensors.safetensors", "state.json"):
            ours, theirs = (
                max((each / "methods" / method / "checkpoints").glob("step-*")) / file for each in (stopped, run)
            )
            assert ours.read_bytes() == theirs.read_bytes(), (method, file)
        for file in ("metrics.jsonl", "training.json"):
            paths = [each / "methods" / method / file for each in (stopped, run)]
            assert untimed(paths[0]) == untimed(paths[1]), (method, file)
    assert (stopped / "evaluation.json").read_bytes() == (run / "evaluation.json").read_bytes()
