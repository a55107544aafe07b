"""Runs side by side: the recorded CIFAR-10 runs give Table 1, and made-up runs are grouped by what they are."""

import json
import random
import re
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import REPOSITORY
from trainer.compare.comparison import Comparison, compare_runs, sample_curves
from trainer.compare.grouping import group_runs
from trainer.compare.page import render_page
from trainer.compare.runs import ComparedRun, read_runs
from trainer.compare.text import format_comparison
from trainer.reproduce.experiments import EXPERIMENTS
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import Identity
from trainer.reproduce.tables import Measure

SHOWN = (EXPERIMENTS["table1"], EXPERIMENTS["figure5"])
SETTINGS = {f"cifar10_{setting.name}" for experiment in SHOWN for setting in experiment.settings}
ROWS = {row.name for experiment in SHOWN for row in experiment.rows}
RECORDED = [
    path
    for path in sorted((REPOSITORY / "results" / "runs").glob("*.json"))
    for setting, *row, _seed in [path.stem.split("-")]
    if setting in SETTINGS and set(row) <= ROWS
]
"""The recorded runs of Table 1, and that of INCV alone for Figure 5."""


@pytest.fixture(scope="module")
def recorded() -> Comparison:
    return compare_runs(read_runs(RECORDED))


def test_recorded_runs_give_the_numbers_of_table_1(recorded: Comparison) -> None:
    (accuracy,) = recorded.accuracy
    table1 = json.loads((REPOSITORY / "results" / "table1.json").read_text())
    recipes = {setting.name: setting.recipe for setting in EXPERIMENTS["table1"].settings}
    stages = {row.name: row for row in EXPERIMENTS["table1"].rows}
    compared = 0
    for name, settings in table1.items():
        for setting, expected in settings.items():
            row = f"{stages[name].stage}, plus" if stages[name].suffix == "_plus" else stages[name].stage
            cell = accuracy.table[row, recipes[setting]]
            measures: dict[Measure, Any] = {expected["measure"]: expected}
            measures |= {key: expected[key] for key in ("last", "last_10", "ensemble") if key in expected}
            for measure, values in measures.items():
                summary = cell.measures[measure].as_json()
                assert summary == {key: values[key] for key in ("mean", "std", "seeds")}
                compared += 1
    assert compared >= 28


def test_results_come_before_what_differs(recorded: Comparison) -> None:
    text, page = format_comparison(recorded), render_page(recorded)
    assert text.index("accuracy on test") < text.index("what differs in the recipe") < text.index("note: ")
    order = [page.index(f'id="{name}"') for name in ("groups", "accuracy", "curves", "cost", "recipe", "files")]
    assert order == sorted(order)


def test_the_terminal_and_the_page_show_every_number_of_the_results_page(recorded: Comparison) -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text()
    table = page.partition("<!-- table1:")[2].partition("<!-- end of table1")[0]
    rows = [line for line in table.splitlines() if line.startswith("|") and "paper" not in line]
    numbers = {number for row in rows for number in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)? \(\d+\)", row)}
    assert len(numbers) >= 28
    text, html = format_comparison(recorded), render_page(recorded)
    assert not [number for number in numbers if number not in text or number not in html]


def test_label_precision_and_recall_are_those_of_the_last_round(recorded: Comparison) -> None:
    names = (*(f"cifar10_sym50-seed{seed}" for seed in range(3)), "cifar10_sym50-coteaching_incv-seed3")
    seeds = [json.loads((RECORDED[0].parent / f"{name}.json").read_text()) for name in names]
    head, *lines = recorded.selection
    number = next(group.number for group in recorded.groups if group.name == "cifar10_sym50, coteaching_incv")
    line = dict(zip(head, next(each for each in lines if each[0] == str(number)), strict=True))
    for column, key in (("LP (%)", "label_precision"), ("LR (%)", "label_recall")):
        values = [100 * seed["rounds"][-1][key] for seed in seeds]
        assert line[column] == f"{mean(values):.2f} ± {stdev(values):.2f} (4)"


def test_only_what_differs_in_the_recipe_is_listed(recorded: Comparison) -> None:
    by_key = {each.key: dict(each.values) for each in recorded.recipe}
    groups = {group.number: group for group in recorded.groups}
    assert {
        recipe: ratio
        for ratio, numbers in by_key["labels.ratio"].items()
        for recipe in {groups[number].recipe for number in numbers if groups[number].method != "incv"}
    } == {
        f"cifar10_{setting}{suffix}": ratio
        for setting, ratio in (("sym20", "0.2"), ("sym50", "0.5"), ("sym80", "0.8"), ("asym40", "0.4"))
        for suffix in ("", "_plus")
    }
    assert {groups[number].method for number in by_key["incv"]["used"]} == {"coteaching_incv", "incv"}
    assert {groups[number].method for number in by_key["incv.rounds"]["1"]} == {"incv"}
    assert by_key["<method>.rank"].keys() == {"not set", "eval_first", "not used"}
    assert {groups[number].method for number in by_key["standard"]["used"]} == {"forward_correction"}
    assert {groups[number].recipe for number in by_key["incv.epochs"]["100"]} == {"cifar10_sym80_plus"}
    assert not {"model.name", "batch.global", "seed", "standard.epochs", "<method>.epochs"} & by_key.keys()


def make_run(
    seed: int = 0,
    top1: float = 80.0,
    name: str = "",
    keys: dict[str, Any] | None = None,
    method: str = "standard",
    **fields: Any,
) -> ComparedRun:
    content = {
        "recipe": "made_up",
        "method": method,
        "seed": seed,
        "command": "incv run",
        "accuracy": {"test": {method: {"top1": top1}}},
        "keys": {"seed": seed, "data.train.checksum": "abc", **(keys or {})},
        "numerics": {method: 1},
        **fields,
    }
    record = RunRecord.model_validate(content)
    return ComparedRun(name or f"{method}-{seed}-{top1}-{keys}", record, Identity(record.keys, record.numerics))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3]), st.floats(0, 100)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_groups_do_not_depend_on_the_order_of_runs(
    drawn: list[tuple[int, int, float]], shuffler: random.Random
) -> None:
    unique = {(seed, epochs): top1 for seed, epochs, top1 in drawn}
    runs = [make_run(seed, top1, keys={"standard.epochs": epochs}) for (seed, epochs), top1 in unique.items()]

    def contents(runs: list[ComparedRun]) -> set[tuple[str, frozenset[str]]]:
        return {(group.row, frozenset(run.name for run in group.runs)) for group in group_runs(runs)}

    mixed = list(runs)
    shuffler.shuffle(mixed)
    groups = group_runs(runs)
    assert contents(runs) == contents(mixed)
    assert sum(len(group.runs) + len(group.repeated) for group in groups) == len(runs)
    assert len(groups) == len({epochs for _, epochs in unique})


def test_groups_are_named_by_what_tells_them_apart() -> None:
    runs = [make_run(keys={"batch.global": size, "image.size": 32}) for size in (64, 128)]
    assert [group.row for group in group_runs(runs)] == ["standard, batch.global=64", "standard, batch.global=128"]
    text = format_comparison(compare_runs(runs))
    assert "batch.global  64: 1; 128: 2" in text
    assert "image.size" not in text


def test_an_ablation_names_each_group_by_what_it_changes() -> None:
    base = {"batch.global": 128, "image.cutout": 16, "standard.epochs": 200}
    changes = [{}, {"batch.global": 64}, {"image.cutout": 8}, {"standard.epochs": 100}]
    assert [group.row for group in group_runs([make_run(keys=base | change) for change in changes])] == [
        "standard",
        "standard, batch.global=64",
        "standard, image.cutout=8",
        "standard, standard.epochs=100",
    ]


def test_a_name_means_the_same_in_all_recipes() -> None:
    sizes = [("made_up", 64), ("made_up", 128), ("other", 128)]
    runs = [make_run(name=f"{recipe}-{size}", keys={"batch.global": size}, recipe=recipe) for recipe, size in sizes]
    assert [group.row for group in group_runs(runs)] == ["standard, batch.global=64", "standard", "standard"]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["batch.global", "image.size", "incv.rounds", "incv.epochs", "standard.epochs"]),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda keys: tuple(sorted(keys.items())),
    )
)
def test_no_two_groups_of_a_recipe_have_the_same_name(every: list[dict[str, int]]) -> None:
    rows = [group.row for group in group_runs([make_run(name=str(keys), keys=keys) for keys in every])]
    assert len(set(rows)) == len(rows) == len(every)


def test_a_table_tells_apart_only_the_groups_that_it_has() -> None:
    runs = [
        make_run(name="all images"),
        make_run(name="fit", keys={"data.train.split": "fit", "data.train.checksum": "def"}),
        make_run(name="fit, small", keys={"data.train.split": "fit", "data.train.checksum": "def", "image.size": 16}),
    ]
    for run in runs[1:]:
        run.record.accuracy["validation"] = run.record.accuracy.pop("test")
    comparison = compare_runs(runs)
    assert comparison.groups[0].variant.startswith("data.train.split=not set")
    assert {table.evaluation_set: [row.name for row in table.experiment.rows] for table in comparison.accuracy} == {
        "test": ["standard"],
        "validation": ["standard, image.size=not set", "standard, image.size=16"],
    }


def test_a_section_that_only_some_groups_use_is_named_as_a_whole() -> None:
    incv = {"incv.epochs": 2, "incv.rounds": 1}
    runs = [make_run(keys=incv), make_run(keys={**incv, "incv.rounds": 3}), make_run()]
    rows = [group.row for group in group_runs(runs)]
    assert rows == [
        "standard, incv.rounds=1",
        "standard, incv.rounds=3",
        "standard, without incv",
    ]
    assert [group.row for group in group_runs([runs[0], runs[2]])] == [
        "standard, with incv",
        "standard, without incv",
    ]


def test_unknown_checksums_and_evaluation_keys_do_not_separate_runs_but_other_data_do() -> None:
    old = make_run(1)
    old = ComparedRun("old", old.record, Identity({"seed": 1}))
    assert len(group_runs([make_run(0), old])) == 1
    assert len(group_runs([make_run(0), make_run(1, keys={"evaluation.every": 1})])) == 1
    assert len(group_runs([make_run(0), make_run(1, keys={"data.train.checksum": "other"})])) == 2
    assert len(group_runs([make_run(0), make_run(1, numerics={"standard": 2})])) == 2
    assert len(group_runs([make_run(0, numerics={"standard": 2}), make_run(1)])) == 2


def test_a_seed_counts_once_and_the_repeat_is_named() -> None:
    early = make_run(0, 10.0, name="early", date="2026-01-01")
    late = make_run(0, 20.0, name="late", date="2026-02-01")
    comparison = compare_runs([late, early, make_run(1, 30.0)])
    (group,) = comparison.groups
    assert [run.name for run in group.repeated] == ["late"]
    assert "20.00 ± 14.14 (2)" in format_comparison(comparison)
    assert any("late does not count" in note for note in comparison.notes)


def test_the_epoch_of_an_accuracy_is_named() -> None:
    last, best = make_run(0), make_run(0, keys={"evaluation.choose_on": "held_out", "evaluation.every": 1})
    for runs, epoch in (([last], "last epoch"), ([best], "chosen epoch"), ([last, best], "or the chosen one")):
        text = format_comparison(compare_runs(runs))
        assert epoch in text
        assert "evaluation.every" not in text  # it decides nothing where no epoch is chosen


def test_a_recipe_that_extends_another_has_a_row_in_its_column() -> None:
    runs = [make_run(top1=number, recipe=name) for number, name in enumerate(("base", "base_plus", "baseball"))]
    (table,) = compare_runs(runs).accuracy
    assert {place: cell.measures["last"].mean for place, cell in table.table.items() if cell.measures} == {
        ("standard", "base"): 0.0,
        ("standard, plus", "base"): 1.0,
        ("standard", "baseball"): 2.0,
    }
    (table,) = compare_runs(runs[1:]).accuracy
    assert ("standard", "base_plus") in table.table


def test_many_recipes_have_a_row_each() -> None:
    runs = [make_run(top1=number, recipe=f"recipe{number}") for number in range(9)]
    lines = format_comparison(compare_runs(runs)).splitlines()
    assert sum(bool(re.search(r"recipe\d, standard +last epoch +\d\.00 \(1\)", line)) for line in lines) == 9


def test_curves_are_sampled_at_the_epochs_that_were_evaluated() -> None:
    long = make_run(keys={"evaluation.every": 2}, accuracy_per_epoch={"test": [float(i) for i in range(50)]})
    short = make_run(method="coteaching", accuracy_per_epoch={"test": [5.0, 6.0]})
    (curves,) = compare_runs([long, short]).curves
    head, first, second = sample_curves(curves)
    assert (head[1], head[-2], head[-1]) == ("2", "100", "last")
    assert (first[1], first[-2], first[-1]) == ("0.000", "49.00", "49.00")
    assert second[1:] == ["6.000", *["–"] * 7, "6.000"]


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\n"


def test_names_with_markup_and_control_characters_are_text() -> None:
    run = make_run(
        recipe=HOSTILE,
        method=HOSTILE,
        name=f"/runs/{HOSTILE}",
        keys={HOSTILE: HOSTILE},
        machine=HOSTILE,
        accuracy={HOSTILE: {HOSTILE: {"top1": 50.0}}},
        accuracy_per_epoch={HOSTILE: [1.0, 2.0]},
    )
    comparison = compare_runs([run, make_run(machine="other", accuracy_per_epoch={HOSTILE: [1.0]}), run])
    text, page = format_comparison(comparison), render_page(comparison)
    for bad in ("\x1b", "\u202e"):
        assert bad not in text
        assert bad not in page
    assert "\\x1b[31m" in text
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_requests_nothing(recorded: Comparison) -> None:
    page = render_page(recorded)
    assert "default-src 'none'" in page
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!data:|#)[\w/.:]+", page)
    # Accuracy, label precision and label recall of four families of recipes; each for wide screens and for phones.
    assert page.count("<svg") == 2 * 3 * 4
