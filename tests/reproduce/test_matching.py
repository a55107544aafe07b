"""Recorded runs count for the run with their result keys; a difference makes them stale, and none is mixed in."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.reproduce.experiments import EXPERIMENTS
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import (
    Identity,
    PlannedRun,
    comparable_keys,
    find_differences,
    match_records,
    plan_runs,
    seeds_of,
)

PLANNED = plan_runs(EXPERIMENTS["table1"], (0, 1, 2))
KEY = st.sampled_from(["precision", "labels.ratio", "model.name", "standard.epochs", "data.train.checksum"])
KEYS = st.dictionaries(KEY, st.integers(0, 3), max_size=5)


def record(run: PlannedRun, keys: dict[str, Any] | None = None, **fields: Any) -> RunRecord:
    content = {"recipe": run.recipe, "method": run.stage, "seed": run.seed, "command": run.command, "accuracy": {}}
    identity = {"keys": keys_of(run) if keys is None else keys, "numerics": {run.stage: 1}}
    return RunRecord.model_validate(content | identity | fields)


def keys_of(run: PlannedRun) -> dict[str, Any]:
    return {"recipe": run.recipe, "stage": run.stage, "seed": run.seed, "precision": "bf16"}


EXPECTED = {run: Identity(keys_of(run), {run.stage: 1}) for run in PLANNED}


@given(st.sets(st.sampled_from(PLANNED)), st.sets(st.sampled_from(PLANNED)), st.sets(st.sampled_from(PLANNED)))
def test_only_runs_with_the_same_keys_and_numerics_count(
    fresh: set[PlannedRun], other_keys: set[PlannedRun], other_numerics: set[PlannedRun]
) -> None:
    records = {f"fresh-{run.slug}": record(run) for run in fresh}
    records |= {f"keys-{run.slug}": record(run, keys_of(run) | {"precision": "fp32"}) for run in other_keys}
    records |= {f"old-{run.slug}": record(run, numerics={run.stage: 2}) for run in other_numerics}
    matching = match_records(EXPECTED, records)
    assert matching.recorded == {run: f"fresh-{run.slug}" for run in fresh}
    assert {each.file for each in matching.stale} == {name for name in records if not name.startswith("fresh")}
    assert all(each.reasons for each in matching.stale)
    assert set(matching.missing(PLANNED)) == set(PLANNED) - fresh
    assert not matching.superseded


@given(KEYS, KEYS)
def test_differences_name_exactly_the_keys_that_differ(one: dict[str, int], other: dict[str, int]) -> None:
    differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    if not ("data.train.checksum" in one and "data.train.checksum" in other):
        differing -= {"data.train.checksum"}
    found = find_differences(Identity(one), Identity(other))
    assert {text.split(" ")[0] for text in found} == differing
    assert not find_differences(Identity(one), Identity(one))
    assert len(found) == len(find_differences(Identity(other), Identity(one)))


def test_a_difference_shows_both_values() -> None:
    recorded, expected = Identity({"precision": "bf16"}, {"incv": 1}), Identity({"batch.global": 128}, {"incv": 3})
    assert find_differences(recorded, expected) == (
        "batch.global (default -> 128)",
        'precision ("bf16" -> default)',
        "numerics of incv (1 -> 3)",
    )


def test_evaluations_that_choose_nothing_do_not_matter() -> None:
    assert comparable_keys({"evaluation.every": 1, "seed": 3}) == {"seed": 3}
    choosing = {"evaluation.every": 1, "evaluation.choose_on": "val"}
    assert comparable_keys(choosing) == choosing


def test_a_record_counts_for_the_most_similar_of_several_runs() -> None:
    """The runs of a figure over noise ratios share recipe, stage and seed."""
    low, high = (replace(PLANNED[0], setting=name, overrides=(name,)) for name in ("low", "high"))
    expected = {low: Identity({"ratio": 0.2, "a": 1}), high: Identity({"ratio": 0.8, "a": 1})}
    records = {
        "high.json": record(PLANNED[0], {"ratio": 0.8, "a": 1}),
        "stale.json": record(PLANNED[0], {"ratio": 0.2, "a": 2}),
    }
    matching = match_records(expected, records)
    assert matching.recorded == {high: "high.json"}
    assert [(each.file, each.reasons) for each in matching.stale] == [("stale.json", ("a (2 -> 1)",))]


def test_of_several_records_of_one_run_the_first_that_has_what_is_needed_counts() -> None:
    """So that a run cannot be repeated until its result is better."""
    run = PLANNED[0]
    curve = {"accuracy_per_epoch": {"test": [1.0, 2.0]}}
    records = {
        "a.json": record(run, **curve),
        "b.json": record(run, date="2026-01-03", **curve),
        "c.json": record(run, date="2026-01-01"),
        "d.json": record(run, date="2026-01-02", **curve),
    }
    matching = match_records(EXPECTED, records)
    assert matching.recorded == {run: "c.json"}
    assert {each.file for each in matching.superseded} == {"a.json", "b.json", "d.json"}
    with_curve = match_records(EXPECTED, records, lambda each: bool(each.curve_on("test")))
    assert with_curve.recorded == {run: "d.json"}


def test_a_record_without_what_is_needed_leaves_a_gap_and_is_not_stale() -> None:
    records = {"a.json": record(PLANNED[0])}
    matching = match_records(EXPECTED, records, lambda each: bool(each.curve_on("test")))
    assert not matching.recorded
    assert not matching.stale


def test_what_is_not_among_the_runs_is_left_out() -> None:
    matching = match_records(EXPECTED, {"a.json": record(PLANNED[0], {})})
    assert matching.among([PLANNED[0]]) == matching
    assert not matching.among(PLANNED[1:]).stale


def test_recorded_seeds_beyond_those_asked_for_count() -> None:
    records = [record(replace(PLANNED[0], seed=seed)) for seed in (7, 1, 4)]
    assert seeds_of(records, (0, 1)) == [0, 1, 4, 7]
