"""Table 1 from made-up records, against numbers worked out by hand."""

from statistics import stdev

import pytest

from trainer.reproduce.experiments import EXPERIMENTS, select_cells
from trainer.reproduce.figures import arrange, draw_curves, mean_curve
from trainer.reproduce.paper import TABLE1
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import PlannedRun, plan_runs
from trainer.reproduce.tables import build_table, format_markdown, format_text, measure_run, summarise, table_json

(EXPERIMENT,) = select_cells([EXPERIMENTS["table1"]], ["standard", "coteaching"], ["sym20", "sym50"])
RUNS = {(run.row, run.setting, run.seed): run for run in plan_runs(EXPERIMENT, (0, 1, 2))}


def record(run: PlannedRun, top1: float, curve: list[float], ensemble: float | None = None) -> RunRecord:
    accuracy = {"test": {run.stage: {"top1": top1, "top1_ensemble": ensemble, "count": 10_000}}}
    content = {"recipe": run.recipe, "method": run.stage, "seed": run.seed, "command": "", "accuracy": accuracy}
    content |= {"keys": {}, "numerics": {}}
    return RunRecord.model_validate(content | {"accuracy_per_epoch": {"test": curve}})


@pytest.fixture
def recorded() -> tuple[dict[PlannedRun, str], dict[str, RunRecord]]:
    curve = [*([0.0] * 5), 80.0, 81.0, 82.0, 83.0, 84.0, 85.0, 86.0, 87.0, 88.0, 89.0]
    found = {
        RUNS["coteaching", "sym20", 0]: record(RUNS["coteaching", "sym20", 0], 88.0, curve, 90.0),
        RUNS["coteaching", "sym20", 2]: record(RUNS["coteaching", "sym20", 2], 90.0, [], 91.0),
        RUNS["standard", "sym50", 1]: record(RUNS["standard", "sym50", 1], 75.41, []),
    }
    return {run: f"{run.slug}.json" for run in found}, {f"{run.slug}.json": each for run, each in found.items()}


def test_a_cell_is_the_mean_over_seeds(recorded) -> None:
    table = table_json(EXPERIMENT, build_table(EXPERIMENT, *recorded), TABLE1)
    cell = table["coteaching"]["sym20"]
    assert (cell["mean"], cell["seeds"]) == (89.0, 2)
    assert cell["std"] == pytest.approx(2**0.5, abs=1e-4)  # of a sample: (1 + 1) / (2 - 1)
    assert cell["ensemble"]["mean"] == 90.5
    assert cell["last_10"] == {"mean": 84.5, "std": None, "seeds": 1}  # recorded for one of the runs
    assert cell["paper"] == {"mean": 89.05, "std": 0.32}
    assert cell["runs"] == ["cifar10_sym20-coteaching-seed0.json", "cifar10_sym20-coteaching-seed2.json"]
    file = "cifar10_sym50-standard-seed1.json"
    assert table["standard"] == {"sym50": {"mean": 75.41, "std": None, "seeds": 1, "measure": "last", "runs": [file]}}


def test_plus_states_the_ensemble_first_and_says_so() -> None:
    (experiment,) = select_cells([EXPERIMENTS["table1"]], ["coteaching_incv_plus"], ["sym20"])
    runs = plan_runs(experiment, (0, 1))
    records = {run.slug: record(run, 80.0 + run.seed, [], 90.0 + 2 * run.seed) for run in runs}
    table = build_table(experiment, {run: run.slug for run in runs}, records)
    cell = table_json(experiment, table, TABLE1)["coteaching_incv_plus"]["sym20"]
    assert (cell["mean"], cell["seeds"], cell["measure"]) == (91.0, 2, "ensemble")
    assert cell["last"]["mean"] == 80.5
    assert format_markdown(experiment, table, TABLE1).splitlines()[2:] == [
        "| **INCV + Co-teaching, plus** | ensemble of both networks, last epoch | 91.00 ± 1.41 (2) |",
        "|  | mean of both networks, last epoch | 80.50 ± 0.71 (2) |",
    ]
    lines = format_text(experiment, table, TABLE1).splitlines()
    assert lines[-2].startswith("INCV + Co-teaching, plus  ensemble of both networks")
    assert lines[-1].strip().startswith("mean of both networks, last epoch")


def test_the_ablation_states_validation_accuracies_alone() -> None:
    (experiment,) = select_cells([EXPERIMENTS["ablation"]], ["plus_without_ema"], ["asym40_validation"])
    (run,) = plan_runs(experiment, (0,))
    tested = record(run, 99.0, [99.0] * 10, 99.0)
    accuracy = {"validation": {run.stage: {"top1": 80.0, "top1_ensemble": 82.5}}}
    own = RunRecord.model_validate(tested.model_dump() | {"accuracy": accuracy})
    found, empty = (
        table_json(experiment, build_table(experiment, {run: "file"}, {"file": each}), {}) for each in (own, tested)
    )
    cell = found["plus_without_ema"]["asym40_validation"]
    assert (cell["mean"], cell["measure"], cell["last"]["mean"]) == (82.5, "ensemble", 80.0)
    assert "last_10" not in cell  # the curve is that of the test set
    assert empty == {"plus_without_ema": {}}


def test_the_text_puts_the_papers_values_below(recorded) -> None:
    lines = format_text(EXPERIMENT, build_table(EXPERIMENT, *recorded), TABLE1).splitlines()
    assert "89.00 ± 1.41 (2)" in next(line for line in lines if line.startswith("Co-teaching"))
    assert "89.05 ± 0.32 (5)  82.12 ± 0.59 (5)" in lines[-1]
    assert next(line for line in lines if line.startswith("Standard training")).split()[-3:] == ["–", "75.41", "(1)"]


def test_the_markdown_has_one_column_for_each_setting(recorded) -> None:
    lines = format_markdown(EXPERIMENT, build_table(EXPERIMENT, *recorded), TABLE1).splitlines()
    assert lines[0] == "| | | symmetric 0.2 | symmetric 0.5 |"
    assert "| **Standard training** | last epoch | – | 75.41 (1) |" in lines
    assert "| | paper | 89.05 ± 0.32 (5) | 82.12 ± 0.59 (5) |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_summaries_of_few_values() -> None:
    assert summarise([]) is None
    one, three = summarise([4.0]), summarise([1.0, 2.0, 6.0])
    assert one is not None
    assert (one.mean, one.std, one.seeds, str(one)) == (4.0, None, 1, "4.00 (1)")
    assert three is not None
    assert (three.mean, three.std) == (3.0, stdev([1.0, 2.0, 6.0]))


def test_too_few_epochs_have_no_mean_of_the_last_ten() -> None:
    run = RUNS["standard", "sym20", 0]
    assert measure_run(record(run, 50.0, [1.0] * 9)) == {"last": 50.0}
    assert measure_run(record(run, 50.0, [0.0] + [2.0] * 10)) == {"last": 50.0, "last_10": 2.0}


def test_curves_are_averaged_over_seeds_and_drawn_by_setting(recorded) -> None:
    assert mean_curve([[1.0, 2.0, 3.0], [3.0, 4.0]]) == [2.0, 3.0]
    runs = {run: recorded[1][file] for run, file in recorded[0].items()}
    curves = {run: each for run, each in runs.items() if each.curve_on("test")}
    figure = draw_curves(EXPERIMENT, curves)
    assert figure is not None
    assert figure.count("<svg ") == 2  # the file, and the one setting with a curve
    assert "symmetric 0.2" in figure
    assert "symmetric 0.5" not in figure
    assert draw_curves(EXPERIMENT, {}) is None


def test_panels_are_placed_side_by_side_and_below_each_other() -> None:
    chart = '<svg role="img" viewBox="0 0 100 50" width="100" height="50"></svg>'
    figure = arrange("three", [("a", chart), ("b", chart), ("c", chart)])
    assert 'viewBox="0 0 272 224"' in figure  # 24 + 2 * (100 + 24), 24 + 2 * (26 + 50 + 24)
    assert [figure.count(f'<svg x="{x}" y="{y}" ') for x, y in ((24, 50), (148, 50), (24, 150))] == [1, 1, 1]
