"""The GPU benchmarks: lines as requested, nothing measured twice, references independent of the trainer."""

import argparse
import ast
import copy
import importlib
import json
import os
import subprocess
import sys
from statistics import mean, stdev

import pytest
import torch

from shards.errors import ConfigError
from tests.support import REPOSITORY
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.standard import StandardTask
from trainer.models.twin import TwinModel

BENCHMARKS = REPOSITORY / "benchmarks"
REFERENCES = sorted(BENCHMARKS.glob("*_references.py"))
ALLOWED = {"torch", "torchvision", "timm", "nvidia"} | sys.stdlib_module_names
FIELDS = {"name", "command", "value", "reference", "ratio", "runs", "spread", "machine", "date", "versions"}


def called(*arguments):
    """A script of ours in a process of its own, on one core and without a GPU."""
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def gpu(*arguments):
    return called(BENCHMARKS / "gpu.py", *arguments)


def lines_in(results):
    return {line["name"]: line for line in map(json.loads, results.read_text().splitlines())}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    results = tmp_path_factory.mktemp("figures") / "gpu.jsonl"
    done = gpu("coteaching_step_b128", "single_step_b512", "end_to_end_b256", "--small", "--results", results)
    assert done.returncode == 0, done.stderr
    return results


@pytest.mark.parametrize("file", REFERENCES, ids=lambda file: file.name)
def test_a_reference_imports_nothing_of_ours(file):
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported <= ALLOWED


def test_there_are_references():
    assert {file.name for file in REFERENCES} >= {"loading_references.py", "step_references.py"}


@pytest.fixture
def modules(monkeypatch):
    """The references and our side, as the scripts import them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("step_references"), importlib.import_module("our_steps")


@pytest.mark.parametrize("method", ["single", "eval_first", "one_pass"])
def test_a_reference_makes_the_step_that_ours_makes(modules, method):
    """The same weights after three steps: the two sides of a ratio are the same work."""
    references, ours = modules
    bench = ours.Bench(torch.device("cpu"), "digits_cnn", "cifar_resnet8", 10, 32, fast=False)
    torch.manual_seed(0)
    one, other = (references.network("cifar_resnet8", 10, bench.device) for _ in range(2))
    before = copy.deepcopy(one)
    setting, batches, keep = ours.setting(bench, ours.SGD), ours.resident_batches(bench, 16, 3), 11
    pair = TwinModel(copy.deepcopy(one), copy.deepcopy(other))
    if method == "single":
        step = references.PlainStep(one)
        task = StandardTask(pair.a, setting)
    else:
        way = references.RankedCoteaching if method == "eval_first" else references.OneForwardCoteaching
        reference = way(one, other)
        task = CoteachingTask(pair, setting, ForgetSchedule(16, 1 - keep / 16, 10), method)

        def step(images, labels):
            reference(images, labels, keep)

    repeated = ours.Repeated(task, batches)
    for _, (batch, labels) in zip(batches, ours.labelled(bench, batches), strict=False):
        step(batch.images, labels)
        repeated()
    moved = _distance(one, before)
    assert moved > 0.01
    assert _distance(one, pair.a) < 0.02 * moved
    if method != "single":
        assert _distance(other, pair.b) < 0.02 * moved


def _distance(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return float(sum((a.detach() - b.detach()).square().sum() for a, b in pairs)) ** 0.5


@pytest.mark.slow
def test_every_line_has_its_fields(measured):
    lines = lines_in(measured)
    asked = {"coteaching_step_b128", "coteaching_step_b128_eval_first", "single_step_b512", "end_to_end_b256"}
    assert lines.keys() == asked
    for line in lines.values():
        assert line.keys() >= FIELDS | {"unit", "note"}
        assert line["value"] > 0
        assert line["runs"] >= 2
        assert {"torch", "timm", "incv_code"} <= line["versions"].keys()
        assert line["small"] is True  # nobody may take it for a figure of the GPU


@pytest.mark.slow
def test_a_ratio_is_value_over_reference_and_an_absolute_figure_has_none(measured):
    lines = lines_in(measured)
    absolute = lines.pop("single_step_b512")
    assert (absolute["reference"], absolute["ratio"]) == (None, None)
    for line in lines.values():
        assert line["ratio"] == pytest.approx(line["value"] / line["reference"], rel=1e-3)


@pytest.mark.slow
def test_eval_first_is_told_beside_one_pass(measured):
    lines = lines_in(measured)
    said = f"eval_first: {lines['coteaching_step_b128_eval_first']['value']:,.0f} images/s"
    assert said in lines["coteaching_step_b128"]["note"]


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(measured):
    before = measured.read_bytes()
    done = gpu("coteaching_step_b128_eval_first", "single_step_b512", "--small", "--results", measured)
    assert done.returncode == 0
    assert done.stderr.count("already in") == 2
    assert measured.read_bytes() == before


@pytest.mark.slow
def test_other_code_is_measured_again(measured, tmp_path):
    line = lines_in(measured)["single_step_b512"]
    line["versions"]["incv_code"] = "0" * 16
    results = tmp_path / "gpu.jsonl"
    results.write_text(json.dumps(line) + "\n")
    assert gpu("single_step_b512", "--small", "--results", results).returncode == 0
    assert len(results.read_text().splitlines()) == 2


def test_an_unknown_figure_is_refused_with_the_list():
    done = gpu("single_step_b129")
    assert done.returncode == 2
    assert "single_step_b129" in done.stderr
    assert "single_step_b128, single_step_b512, end_to_end_b256" in done.stderr


@pytest.mark.slow
def test_small_lines_are_kept_out_of_the_results():
    done = gpu("single_step_b128", "--small")
    assert done.returncode == 2
    assert "--results" in done.stderr


@pytest.mark.slow
def test_without_a_gpu_only_small_figures_are_tried(tmp_path):
    results = tmp_path / "gpu.jsonl"
    done = gpu("single_step_b128", "--results", results)
    assert done.returncode == 1
    assert "--small" in done.stderr
    assert not results.exists()


@pytest.fixture(scope="module")
def agreed(tmp_path_factory):
    """The line of both ways over a few digits, without graphs."""
    results = tmp_path_factory.mktemp("agreement") / "gpu.jsonl"
    done = gpu("graphs_bf16_agree", "--small", "--results", results)
    assert done.returncode == 0, done.stderr
    return lines_in(results)["graphs_bf16_agree"]


@pytest.mark.slow
def test_an_agreement_tells_every_seed_of_both_ways(agreed):
    assert agreed.keys() >= FIELDS | {"unit", "note", "details"}
    assert (agreed["reference"], agreed["ratio"], agreed["runs"]) == (None, None, 2)
    loss, accuracy = agreed["details"]["loss"], agreed["details"]["test_accuracy"]
    for way in ("graphs_bf16", "eager_fp32"):
        assert loss[way]["mean"] == pytest.approx(mean(loss[way]["seeds"]), abs=2e-6)
        assert [len(epochs) for epochs in accuracy[way]["epochs"]] == [3, 3]
        assert accuracy[way]["seeds"] == pytest.approx([mean(epochs) for epochs in accuracy[way]["epochs"]], abs=2e-6)
    assert len(set(loss["graphs_bf16"]["seeds"] + loss["eager_fp32"]["seeds"])) == 4  # four different trainings
    assert agreed["value"] == pytest.approx(
        abs(loss["graphs_bf16"]["mean"] / loss["eager_fp32"]["mean"] - 1), abs=5e-6
    )


@pytest.mark.slow
def test_the_eager_way_is_the_stage_of_a_run(agreed, tmp_path):
    """The same loss of the last epoch and the same test accuracy that `incv run` comes to, to the last digit."""
    recipe, run = BENCHMARKS.parent / "recipes" / "tiny.yaml", tmp_path / "run"
    keys = (
        "methods=[standard]",
        "standard.epochs=3",
        f"data.train.shards={tmp_path / 'train'}",
        f"data.eval.test.shards={tmp_path / 'test'}",
        "execution.log_every=10",
        "seed=1",
    )
    done = called("-m", "trainer", "run", "-c", recipe, "--run-dir", run, *keys)
    assert done.returncode == 0, done.stderr
    last = json.loads((run / "methods" / "standard" / "metrics.jsonl").read_text().splitlines()[-1])
    tested = json.loads((run / "evaluation.json").read_text())["test"]["standard"]
    assert last["step"] == 30
    assert agreed["details"]["loss"]["eager_fp32"]["seeds"][1] == last["loss"]
    accuracy = agreed["details"]["test_accuracy"]["eager_fp32"]["epochs"][1][-1]
    assert accuracy == pytest.approx(tested["networks"][0]["top1"] / tested["count"], abs=1e-6)


@pytest.fixture
def agreement(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("agreement")


def outcomes(agreement, losses, accuracies):
    """Three equal test accuracies a seed."""
    return [agreement.Outcome(loss, (hit,) * 3) for loss, hit in zip(losses, accuracies, strict=True)]


@pytest.mark.parametrize(("factor", "within"), [(1.009, True), (0.991, True), (1.011, False), (0.989, False)])
def test_losses_agree_within_one_percent(agreement, factor, within):
    eager = outcomes(agreement, (1.7, 1.8), (0.6, 0.7))
    found = agreement.compared(outcomes(agreement, (1.7 * factor, 1.8 * factor), (0.6, 0.7)), eager)
    assert found["loss"]["relative_difference"] == pytest.approx(factor - 1)
    assert found["loss"]["within_1_percent"] is within
    assert found["agree"] is within


@pytest.mark.parametrize(("errors", "within"), [(1.9, True), (-1.9, True), (2.1, False), (-2.1, False)])
def test_accuracies_agree_within_two_standard_errors(agreement, errors, within):
    hits = [0.60, 0.62, 0.61, 0.65]
    error = (2 * stdev(hits) ** 2 / len(hits)) ** 0.5
    moved = [hit + errors * error for hit in hits]
    losses = (1.7, 1.8, 1.9, 1.6)
    found = agreement.compared(outcomes(agreement, losses, moved), outcomes(agreement, losses, hits))
    accuracy = found["test_accuracy"]
    assert accuracy["standard_error"] == pytest.approx(error)
    assert accuracy["standard_error_paired"] == pytest.approx(0, abs=1e-9)  # every seed moved alike
    assert accuracy["difference"] == pytest.approx(errors * error)
    assert accuracy["within_2_standard_errors"] is within
    assert found["agree"] is within


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"small": False}, "--root FOLDER"),
        ({"seeds": 0}, "--seeds 2 or more"),
        ({"seeds": 1}, "--seeds 2 or more"),
        ({"epochs": 2}, "--epochs 3 or more"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_way_out(agreement, tmp_path, asked, said):
    usual = {"small": True, "root": None, "seeds": None, "epochs": None, "compile": False}
    with pytest.raises(ConfigError, match=said):
        agreement.plan_of(argparse.Namespace(**usual | asked), tmp_path)


@pytest.mark.slow
def test_graphs_without_a_gpu_are_refused_in_one_line():
    done = called(BENCHMARKS / "agreement.py", "--root", "data/cifar10")
    assert done.returncode == 2
    assert "--small" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_figure_of_real_data_asks_for_its_folder(tmp_path):
    done = gpu("graphs_bf16_agree", "--results", tmp_path / "gpu.jsonl")
    assert done.returncode == 2
    assert "--cifar FOLDER" in done.stderr


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_from_the_trainer_exists(script):
    """Also inside functions, where a renamed function would be noticed only when the figure is measured again."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("trainer", "shards"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, (script.name, node.module, missing)
