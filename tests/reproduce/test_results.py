"""The recorded runs of this repository count, and the table, figures and page made from them are up to date."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shards.errors import DataError
from tests.support import REPOSITORY
from trainer.reproduce.experiments import EXPERIMENTS, select_cells
from trainer.reproduce.outcome import (
    Outcome,
    begin_marker,
    build_files,
    build_part,
    collect_outcome,
    end_marker,
    fill_page,
)
from trainer.reproduce.recording import is_recorded, write_record
from trainer.reproduce.records import RunRecord, read_records

RESULTS = REPOSITORY / "results"
AGAIN = "run `incv reproduce --write`"


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    return read_records(RESULTS / "runs")


@pytest.fixture(scope="module")
def outcomes(records: dict[str, RunRecord]) -> dict[str, Outcome]:
    return {name: collect_outcome(each, records) for name, each in EXPERIMENTS.items()}


def test_recorded_runs_of_table_1_count(outcomes: dict[str, Outcome]) -> None:
    """They are not stale: neither recipes nor numerics have changed since. A change that does must say so here."""
    outcome = outcomes["table1"]
    assert not outcome.matching.stale
    found = {(run.row, run.setting, run.seed) for run in outcome.matching.recorded}
    settings = [setting.name for setting in outcome.experiment.settings]
    assert {("coteaching_incv", setting, seed) for setting in settings for seed in (0, 1, 2)} <= found
    assert {("standard", setting, 0) for setting in settings} <= found


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_written_files_are_up_to_date(name: str, outcomes: dict[str, Outcome]) -> None:
    for path, content in build_files(outcomes[name]).items():
        text = (RESULTS / path).read_text()
        assert (text if isinstance(content, str) else json.loads(text)) == content, AGAIN


def test_the_page_is_up_to_date(outcomes: dict[str, Outcome]) -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text()
    parts = {name: build_part(outcome) for name, outcome in outcomes.items()}
    assert all(begin_marker(name) in page for name in parts), "docs/results.md lacks an experiment"
    assert fill_page(page, parts) == page, AGAIN


def test_table1_json_has_the_documented_form() -> None:
    table = json.loads((RESULTS / "table1.json").read_text())
    assert list(table) == [row.name for row in EXPERIMENTS["table1"].rows]
    for method, settings in table.items():
        for cell in settings.values():
            assert 0 <= cell["mean"] <= 100
            assert cell["seeds"] == len(cell["runs"])
            assert cell["measure"] == ("ensemble" if method.endswith("_plus") else "last")
            assert (cell["std"] is None) == (cell["seeds"] == 1)


def test_only_the_marked_parts_of_a_page_are_written() -> None:
    page = f"before\n{begin_marker('a')}\nold\n{end_marker('a')}\nafter\n"
    filled = fill_page(page, {"a": "new", "b": "elsewhere"})
    assert filled == f"before\n{begin_marker('a')}\n\nnew\n\n{end_marker('a')}\nafter\n"
    assert fill_page(filled, {"a": "new"}) == filled
    with pytest.raises(DataError, match="both markers"):
        fill_page(f"{begin_marker('a')} ...", {"a": "new"})


IDENTITY = {"keys": {}, "numerics": {"standard": 1}}
GOOD = {"recipe": "cifar10_sym20", "method": "standard", "seed": 0, "command": "incv run", "accuracy": {}} | IDENTITY
FOREIGN: dict[str, tuple[str, list[str]]] = {
    "broken": ("{", ["not valid JSON", "move it elsewhere"]),
    "a_list": ("[1]", ["JSON list"]),
    "of_another_program": ('{"name": "x"}', ["`recipe`", "field required"]),
    "a_word_for_a_number": (json.dumps(GOOD | {"seed": "first"}), ["`seed`"]),
    "an_accuracy_that_is_no_percentage": (
        json.dumps(GOOD | {"accuracy": {"test": {"standard": {"top1": float("nan")}}}}),
        ["accuracy.test"],
    ),
    "accuracy_in_words": (
        json.dumps(GOOD | {"accuracy": {"test": {"standard": {"top1": "high"}}}}),
        ["accuracy.test"],
    ),
}


@pytest.mark.parametrize("which", FOREIGN)
def test_a_file_that_is_no_record_is_named(which: str, tmp_path: Path) -> None:
    text, words = FOREIGN[which]
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(DataError) as error:
        read_records(tmp_path)
    assert all(word in str(error.value) for word in ["odd.json", *words])


def test_no_folder_means_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "runs") == {}


def test_a_folder_among_the_records_is_none(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert read_records(tmp_path) == {}


def change(content: dict[str, Any], **fields: Any) -> dict[str, RunRecord]:
    return {"one.json": RunRecord.model_validate(content | fields)}


@pytest.fixture
def standard() -> dict[str, Any]:
    return json.loads((RESULTS / "runs" / "cifar10_sym50-standard-seed0.json").read_text())


def test_changed_keys_data_or_numerics_make_a_real_record_stale(standard: dict[str, Any]) -> None:
    table1 = EXPERIMENTS["table1"]
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "standard.epochs": {"keys": standard["keys"] | {"standard.epochs": 100}},
        "precision": {"keys": {key: value for key, value in standard["keys"].items() if key != "precision"}},
        "data.train.checksum": {"keys": standard["keys"] | {"data.train.checksum": "0"}},
        "numerics of standard": {"numerics": {"standard": 0}},
    }
    for what, fields in changes.items():
        matching = collect_outcome(table1, change(standard, **fields), (0,)).matching
        assert len(matching.recorded) == (not what)
        assert [each.reasons[0].split(" (")[0] for each in matching.stale] == ([what] if what else [])


def test_recorded_runs_of_any_seed_count_for_as_many_as_an_experiment_asks_for(standard: dict[str, Any]) -> None:
    (table1,) = select_cells([EXPERIMENTS["table1"]], ["standard"], ["sym50"])
    other = change(standard | {"keys": standard["keys"] | {"seed": 7}}, seed=7)
    asked = {run.seed for run in collect_outcome(table1, other).planned}
    assert asked == {0, 1, 7}
    assert {run.seed for run in collect_outcome(table1, other).missing()} == {0, 1}
    assert {run.seed for run in collect_outcome(table1, other, (0, 1, 2)).missing()} == {0, 1, 2}
    assert collect_outcome(replace(table1, seeds=(0,)), other).missing() == []


def test_a_stale_record_does_not_keep_a_new_one_from_being_written(standard: dict[str, Any], tmp_path: Path) -> None:
    before, again = (standard | {"numerics": {"standard": version}} for version in (1, 2))
    write_record(tmp_path, before, "one")
    assert is_recorded(tmp_path, before, "one")
    assert not is_recorded(tmp_path, again, "one")
    assert write_record(tmp_path, again, "one", replace=True) != tmp_path / "one.json"
    assert sorted(record.numerics["standard"] for record in read_records(tmp_path).values()) == [1, 2]
