"""Standard training on INCV's selection: which samples each epoch deals, and what its section inherits."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shards.durable import read_json
from shards.errors import ConfigError
from tests.support import RECIPES, processes
from tests.support.command_line import exit_code
from trainer.config.schema import Recipe
from trainer.incv.selection_index import SelectionIndex, State
from trainer.methods.built_in import STANDARD_INCV as METHOD
from trainer.methods.method import Epochs, ExpectedSizes
from trainer.methods.registry import methods_of
from trainer.report.sections.accuracy import describe_methods
from trainer.report.summary import best_method, gain
from trainer.run.recipe import load_recipe

BATCH, EPOCHS = 32, 3
KEYS = (
    "labels.ratio=0.5",
    "incv.rounds=1",
    "incv.noise_estimate=paper",
    "standard.loss={kind: gce, q: 0.7}",
    f"batch.global={BATCH}",
    f"standard.epochs={EPOCHS}",
    "execution.threads=1",
    "execution.trace=true",
)
MODES = ("none", "limited", "all")


def recipe(*keys: str) -> Recipe:
    return load_recipe(RECIPES / "tiny.yaml", ["methods=[standard_incv]", *keys])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run for each value of `candidates`, from the same selection."""
    folder = tmp_path_factory.mktemp("standard_incv")
    processes.pack_digits(folder)
    roots = {mode: folder / mode for mode in MODES}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for mode, root in roots.items():
            keys = (*KEYS, "methods=[standard_incv]", f"standard_incv.candidates={mode}")
            taken = () if mode == MODES[0] else ("--incv-from", str(roots[MODES[0]]))
            assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", str(root), *taken, *keys]) == 0
    return roots


def dealt(run: Path) -> list[list[list[int]]]:
    """The ids of each step of the training, by epoch."""
    lines: list[dict[str, Any]] = [
        line
        for line in map(json.loads, (run / "logs/trace-rank0.jsonl").read_text().splitlines())
        if line["training"] == "standard_incv"
    ]
    per_epoch, rest = divmod(len(lines), EPOCHS)
    assert rest == 0
    return [[line["ids"] for line in lines[first : first + per_epoch]] for first in range(0, len(lines), per_epoch)]


def selection(run: Path) -> tuple[set[int], set[int]]:
    """S and C. The sets of the tests' run are large enough to tell the values of `candidates` apart."""
    index = SelectionIndex.read(run / "selection.parquet")
    selected, candidates = (set(index.ids(state).tolist()) for state in (State.SELECTED, State.CANDIDATE))
    assert len(selected) > 2 * BATCH
    assert candidates
    assert len(index.ids(State.REMOVED))
    return selected, candidates


@pytest.mark.parametrize(("mode", "joined"), [("none", False), ("all", True)])
def test_each_epoch_deals_each_sample_once(runs: dict[str, Path], mode: str, joined: bool) -> None:
    selected, candidates = selection(runs[mode])
    expected = selected | candidates if joined else selected
    for steps in dealt(runs[mode]):
        assert len(steps) == math.ceil(len(expected) / BATCH)
        assert sorted(id_ for step in steps for id_ in step) == sorted(expected)


def test_limited_deals_half_as_many_candidates_as_selected_samples(runs: dict[str, Path]) -> None:
    selected, candidates = selection(runs["limited"])
    for steps in dealt(runs["limited"]):
        seen: list[int] = []
        for ids in steps:
            of_s = [id_ for id_ in ids if id_ in selected]
            of_c = [id_ for id_ in ids if id_ not in selected]
            assert len(of_c) == min(len(of_s) // 2, len(of_s) * len(candidates) // len(selected))
            seen += ids
        assert len(set(seen)) == len(seen)
        assert selected <= set(seen) <= selected | candidates


def test_training_json_has_the_sizes_of_the_selection(runs: dict[str, Path]) -> None:
    for mode, run in runs.items():
        selected, candidates = selection(run)
        facts = read_json(run / "methods/standard_incv/training.json")
        dealt_of_c = 0 if mode == "none" else len(candidates)
        assert (facts["selected"], facts["candidates"]) == (len(selected), dealt_of_c)
        assert facts["steps"] == EPOCHS * len(dealt(run)[0])


def test_the_loss_is_that_of_the_section(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The generalised cross-entropy is at most 1 / q, the cross-entropy of untrained networks is about ln 10."""
    run = runs["none"]
    assert first_loss(run) < 1 / 0.7 < math.log(10)
    monkeypatch.chdir(run.parent)
    other = run.parent / "mixed"
    keys = [each for each in KEYS if "loss" not in each]
    keys += ["methods=[standard_incv]", "standard_incv.mixup.alpha=1", "standard_incv.epochs=1"]
    command = ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", str(other), "--incv-from", str(run), *keys]
    assert exit_code(command) == 0
    assert first_loss(other) == pytest.approx(math.log(10), rel=0.3)
    lines = map(json.loads, (other / "logs/trace-rank0.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["training"] == "standard_incv"]
    assert steps
    assert all(len(line["shares"]) == len(line["ids"]) for line in steps)


def first_loss(run: Path) -> float:
    return float(json.loads((run / "methods/standard_incv/metrics.jsonl").read_text().splitlines()[0])["loss"])


def test_the_report_states_its_gain_over_standard_training() -> None:
    both = describe_methods(["standard", "standard_incv"])
    assert [name for name, role in both.items() if role["headline"]] == ["standard_incv"]
    results = {name: {"top1": top1} for name, top1 in (("standard", 90.0), ("standard_incv", 85.0))}
    report = {"methods": both}
    method = best_method(report, results)
    assert method == "standard_incv"
    assert gain(report, results, method) == (-5.0, "Standard training")


def test_the_pair_is_the_headline_beside_it() -> None:
    names = [method.name for method in methods_of(recipe("methods=[standard_incv, coteaching_incv]"))]
    results = {name: {"top1": 80.0} for name in names}
    assert best_method({"methods": describe_methods(names)}, results) == "coteaching_incv"


def test_its_own_keys_belong_to_its_own_section() -> None:
    with pytest.raises(ConfigError, match=r"standard\.candidates.*unknown|unknown.*standard\.candidates"):
        recipe("standard.candidates=all")


def test_the_network_is_evaluated_and_exported(runs: dict[str, Path]) -> None:
    for run in runs.values():
        assert set(read_json(run / "evaluation.json")["test"]) == {"standard_incv"}
        assert (run / "methods/standard_incv/export/model_a/model.safetensors").exists()
        assert "INCV + standard training" in (run / "report.html").read_text()


def test_unset_keys_are_those_of_standard() -> None:
    loaded = recipe("standard.epochs=7", "standard.loss={kind: gce, q: 0.5}", "standard.mixup.alpha=0.2")
    section = METHOD.config(loaded)
    assert (section.epochs, section.loss.q, section.mixup.alpha, section.candidates) == (7, 0.5, 0.2, "none")
    assert METHOD.config(recipe("standard.epochs=7", "standard_incv.epochs=9")).epochs == 9


@pytest.mark.parametrize(
    ("mode", "epochs"), [("none", Epochs(9, 100)), ("limited", Epochs(9, 100, 40)), ("all", Epochs(9, 140))]
)
def test_the_estimate_counts_the_samples_of_an_epoch(mode: str, epochs: Epochs) -> None:
    loaded = recipe("standard_incv.epochs=9", f"standard_incv.candidates={mode}")
    sizes = ExpectedSizes(samples=200, selected=100, candidates=40, noise=0.5, incv=loaded.incv)
    assert METHOD.expect_epochs(loaded, METHOD.config(loaded), sizes) == [epochs]


def test_the_same_seed_gives_the_same_order_whatever_the_candidates(runs: dict[str, Path]) -> None:
    """The order of S depends on its ids alone, so runs that differ in the candidates can be compared."""
    selected, _ = selection(runs["none"])
    alone, limited = (dealt(runs[mode]) for mode in ("none", "limited"))
    for without, beside in zip(alone, limited, strict=True):
        assert [id_ for step in without for id_ in step] == [
            id_ for step in beside for id_ in step if id_ in selected
        ]
    orders = [np.concatenate(steps).tolist() for steps in alone]
    assert orders[0] != orders[1]


def test_a_missing_section_names_the_one_it_inherits_from(tmp_path: Path) -> None:
    content = yaml.safe_load((RECIPES / "tiny.yaml").read_text())
    del content["standard"]
    file = tmp_path / "alone.yaml"
    file.write_text(yaml.safe_dump(content | {"methods": ["standard_incv"]}))
    with pytest.raises(ConfigError, match=r"a section `standard_incv:` or `standard:`"):
        load_recipe(file)
