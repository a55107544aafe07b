"""The table over the runs of `--vary`."""

import csv
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.durable import read_json
from trainer.report.sweep_table import SweepRun, format_sweep, results_of, summarise_sweep, write_sweep


def made_up_report(confident: float, top1: float, precision: float | None = None) -> dict[str, Any]:
    return {
        "noise": {"paper": None, "confident": confident, "true": None},
        "selection": {"label_precision": precision, "label_recall": None},
        "accuracy": {"test": {"standard": {"top1": top1}, "coteaching": {"top1": None}}},
    }


def run(*overrides: str, report: dict[str, Any] | None) -> SweepRun:
    return SweepRun(overrides, Path("runs") / "-".join(overrides), report)


def test_only_known_results_become_columns() -> None:
    assert results_of(made_up_report(0.25, 90.0)) == {"noise, confident": 25.0, "test, standard": 90.0}
    assert results_of(made_up_report(0.25, 90.0, 0.5))["precision"] == 50.0
    assert results_of({"noise": {"paper": None}, "selection": None, "accuracy": None}) == {}
    assert results_of(None) == {}


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_mean_and_deviation_are_those_over_the_seeds(accuracies: list[float]) -> None:
    runs = [run(f"seed={seed}", report=made_up_report(0.2, top1)) for seed, top1 in enumerate(accuracies)]
    (group,) = summarise_sweep(runs)["over_seeds"]
    assert group["runs"] == len(accuracies)
    assert group["mean"]["test, standard"] == pytest.approx(mean(accuracies))
    assert group["sd"]["test, standard"] == pytest.approx(stdev(accuracies))


def test_only_runs_that_differ_in_the_seed_are_averaged() -> None:
    runs = [
        run(f"seed={seed}", f"labels.ratio={ratio}", report=made_up_report(ratio, 80.0 + seed))
        for seed in (0, 1)
        for ratio in (0.2, 0.5)
    ]
    summary = summarise_sweep(runs)
    assert [group["overrides"] for group in summary["over_seeds"]] == ["labels.ratio=0.2", "labels.ratio=0.5"]
    assert [group["mean"]["noise, confident"] for group in summary["over_seeds"]] == [20.0, 50.0]
    apart = [run(f"labels.ratio={ratio}", report=made_up_report(ratio, 80.0)) for ratio in (0.2, 0.5)]
    assert summarise_sweep(apart)["over_seeds"] == []


def test_a_run_that_has_not_finished_is_listed_without_results() -> None:
    summary = summarise_sweep([run("seed=0", report=made_up_report(0.2, 80.0)), run("seed=1", report=None)])
    assert [one["finished"] for one in summary["runs"]] == [True, False]
    assert summary["over_seeds"] == []
    lines = format_sweep(summary).splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["seed=1", "–", "–"]
    assert "no run has finished" in format_sweep(summarise_sweep([run("seed=1", report=None)]))


def test_the_lines_of_the_table_are_aligned() -> None:
    runs = [run(f"seed={seed}", report=made_up_report(0.2, 90.0 + seed, 0.99)) for seed in (0, 1, 10)]
    lines = format_sweep(summarise_sweep(runs)).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "mean ± sd of 3" in lines[-1]
    assert "93.7 ± 5.5" in lines[-1]


def test_names_are_shortened_as_far_as_they_stay_different() -> None:
    def names(*runs: SweepRun) -> list[str]:
        lines = format_sweep(summarise_sweep(runs)).splitlines()[1:]
        return [line.strip().partition("  ")[0] for line in lines]

    def both(first: str, second: str) -> list[str]:
        return names(*(run(first, f"{second}={number}", report=made_up_report(0.2, 90.0)) for number in (0, 16)))

    rate = "incv.optimizer.learning_rate=0.01"
    assert both(rate, "image.cutout") == ["learning_rate=0.01 cutout=0", "learning_rate=0.01 cutout=16"]
    # The last parts of the keys are equal, or a name cut at its end would be that of another run.
    assert both("incv.epochs=5", "standard.epochs") == [f"incv.epochs=5 standard.epochs={each}" for each in (0, 16)]
    long = "labels={noise: symmetric, ratio: 0.25}"
    assert both(long, "image.cutout") == [f"{long} cutout={each}" for each in (0, 16)]
    (only,) = names(run(long, report=made_up_report(0.2, 90.0)))
    assert only.endswith("…")


def test_the_agreement_of_the_first_round_needs_no_true_label() -> None:
    rounds = [{"agreement": 0.5, "label_precision": None}, {"agreement": 0.25, "label_precision": None}]
    assert results_of(made_up_report(0.25, 90.0) | {"rounds": rounds})["agreement, round 1"] == 50.0


def test_the_files_hold_every_run(tmp_path: Path) -> None:
    runs = [run("seed=0", report=made_up_report(0.2, 80.0)), run("seed=1", report=None)]
    summary = summarise_sweep(runs)
    write_sweep(summary, tmp_path / "table.json")
    assert read_json(tmp_path / "table.json") == summary
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["overrides"] for row in rows] == ["seed=0", "seed=1"]
    assert float(rows[0]["test, standard"]) == 80.0
    assert rows[1]["test, standard"] == ""
