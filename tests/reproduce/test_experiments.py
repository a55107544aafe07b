"""Experiments expand to the runs they need: every cell and seed once, with commands that give these runs."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError
from trainer.config.shipped import RECIPES
from trainer.reproduce.experiments import EXPERIMENTS, SEEDS, find_experiments, select_cells
from trainer.reproduce.runs import drop_parts, identify_plan, iterate_cells, plan_runs, smoke_overrides
from trainer.run.recipe import load_recipe

TABLE1 = EXPERIMENTS["table1"]
each_seed = st.lists(st.integers(0, 99), unique=True, max_size=5)
some_rows = st.sets(st.sampled_from([row.name for row in TABLE1.rows]))
some_settings = st.sets(st.sampled_from([setting.name for setting in TABLE1.settings]))


@given(st.sampled_from(sorted(EXPERIMENTS)), each_seed)
def test_every_cell_is_planned_once_for_each_seed(name: str, seeds: list[int]) -> None:
    experiment = EXPERIMENTS[name]
    planned = plan_runs(experiment, seeds)
    cells = [(row.name, setting.name) for row, setting in iterate_cells(experiment)]
    assert sorted((run.row, run.setting, run.seed) for run in planned) == sorted(
        (*cell, seed) for cell in cells for seed in seeds
    )
    assert len({run.slug for run in planned}) == len({(run.recipe, run.overrides) for run in planned}) == len(planned)
    assert [run.seed for run in planned] == sorted((run.seed for run in planned), key=seeds.index)


@given(some_rows, some_settings)
def test_a_choice_of_cells_plans_a_part_of_the_runs(rows: set[str], settings: set[str]) -> None:
    (chosen,) = select_cells([TABLE1], sorted(rows), sorted(settings))
    part = plan_runs(chosen, SEEDS)
    assert set(part) <= set(plan_runs(TABLE1, SEEDS))
    assert len(part) == len(rows) * len(settings) * len(SEEDS)
    assert select_cells([TABLE1], None, None) == [TABLE1]


def test_a_baseline_is_planned_without_incv() -> None:
    (one,) = plan_runs(select_cells([TABLE1], ["standard"], ["sym50"])[0], [1])
    assert shlex.split(one.command) == [
        *("incv", "run", "-c", "cifar10_sym50", "seed=1", "methods=[standard]", "incv=null"),
        *("precision=bf16", "evaluation.every=1"),
    ]
    (plus,) = plan_runs(select_cells([TABLE1], ["coteaching_incv_plus"], ["asym40"])[0], [0])
    assert (plus.recipe, plus.stage) == ("cifar10_asym40_plus", "coteaching_incv")
    assert "incv=null" not in plus.overrides


def test_table_1_has_the_papers_methods_and_settings() -> None:
    assert [row.name for row in TABLE1.rows] == [
        *("standard", "forward_correction", "decoupling", "coteaching", "mentornet", "d2l"),
        *("coteaching_incv", "coteaching_incv_plus"),
    ]
    assert [setting.name for setting in TABLE1.settings] == ["sym20", "sym50", "sym80", "asym40"]


def test_unknown_names_are_refused_with_near_matches() -> None:
    with pytest.raises(ConfigError, match="did you mean table1"):
        find_experiments(["tabel1"])
    with pytest.raises(ConfigError, match="did you mean decoupling"):
        select_cells([TABLE1], ["decupling"], None)
    with pytest.raises(ConfigError, match="did you mean sym20"):
        select_cells([TABLE1], None, ["sym2"])
    assert find_experiments([]) == list(EXPERIMENTS.values())
    assert find_experiments(["figure6", "table1", "figure6"]) == [EXPERIMENTS["figure6"], TABLE1]


def test_a_setting_may_be_named_as_that_of_the_paper() -> None:
    chosen = select_cells(list(EXPERIMENTS.values()), ["decoupling"], ["sym20"])
    assert {(each.name, one.name) for each in chosen for one in each.settings if each.rows} == {
        ("table1", "sym20"),
        ("figure6", "sym20"),
        ("decoupling_eval_first", "sym20_eval_first"),
    }


def test_a_run_that_is_part_of_another_is_not_planned_twice() -> None:
    (chosen,) = select_cells([TABLE1], ["standard", "forward_correction"], ["sym20", "sym50"])
    runs = plan_runs(chosen, (0, 1))
    both = drop_parts([*runs, *runs])
    assert [(run.row, run.setting, run.seed) for run in both] == [
        ("forward_correction", setting, seed) for seed in (0, 1) for setting in ("sym20", "sym50")
    ]
    assert "methods=[standard, forward_correction]" in both[0].overrides
    alone = [run for run in runs if run.row == "standard"]
    assert drop_parts(alone) == alone
    assert drop_parts([*alone, both[0]]) == [alone[1], *alone[2:], both[0]]


OPTIMIZERS = ("incv.optimizer", "coteaching_incv.optimizer")
PARTS = {  # row of the ablation -> the keys that differ from plus
    "coteaching_incv_plus": set(),
    "plus_without_cosine": {f"{each}.{key}" for each in OPTIMIZERS for key in ("schedule", "milestones")},
    "plus_without_cutout": {"image.cutout"},
    "plus_without_ema": {"coteaching_incv.ema.decay", "coteaching_incv.ema.use_buffers"},
    "plus_with_adam": {
        f"{each}.{key}" for each in OPTIMIZERS for key in ("kind", "learning_rate", "weight_decay", "decay_scope")
    },
    "plus_with_formula": {"coteaching_incv.noise_of_selected"},
    # The estimate is read by the formula alone.
    "plus_with_paper_estimate": {"coteaching_incv.noise_of_selected", "incv.noise_estimate"},
    "plus_with_early_candidates": {"coteaching_incv.warmup_epochs"},
}


def test_each_row_of_the_ablation_changes_one_part_of_plus() -> None:
    runs = {run.row: run for run in plan_runs(EXPERIMENTS["ablation"], (0,))}
    assert set(runs) == {*PARTS, "coteaching_incv"}
    plus = identify_plan(runs["coteaching_incv_plus"]).keys
    for row, changed in PARTS.items():
        keys = identify_plan(runs[row]).keys
        assert {key for key in keys.keys() | plus.keys() if keys.get(key) != plus.get(key)} == changed, row


def test_the_rows_of_the_ablation_together_change_all_that_plus_changes() -> None:
    """Except for the mean and standard deviation of the images, with whose mean Cutout fills."""
    runs = {run.row: run for run in plan_runs(EXPERIMENTS["ablation"], (0,))}
    without, plus = (identify_plan(runs[row]).keys for row in ("coteaching_incv", "coteaching_incv_plus"))
    changed = {key for key in without.keys() | plus.keys() if without.get(key) != plus.get(key)}
    assert changed - set.union(*PARTS.values()) == {"image.mean", "image.std"}


def test_the_ablation_neither_trains_nor_evaluates_on_images_of_the_test_set() -> None:
    for run in plan_runs(EXPERIMENTS["ablation"], (0,)):
        data = load_recipe(RECIPES / f"{run.recipe}.yaml", run.overrides).data
        assert {key: each.split for key, each in data.splits().items()} == {
            "data.train": "fit",
            "data.eval.validation": "validation",
        }
        assert len({each.shards for each in data.splits().values()}) == 2
        assert "data.train.checksum" not in identify_plan(run).keys  # that of the whole training set


@pytest.mark.parametrize("name", [name for name, each in EXPERIMENTS.items() if each.needs != "own_data"])
def test_smoke_runs_of_an_experiment_all_differ(name: str) -> None:
    """Otherwise one record would count for another run."""
    tiny = [run.with_overrides(smoke_overrides(run)) for run in plan_runs(EXPERIMENTS[name], (0,))]
    known = {repr((run.stage, sorted(identify_plan(run, None).keys.items()))) for run in tiny}
    assert len(known) == len(tiny)


def test_noise_ratios_override_a_recipe_of_their_kind() -> None:
    runs = {run.setting: run for run in plan_runs(EXPERIMENTS["figure2"], (0,))}
    assert {"sym70", "sym80", "sym90", "sym100", "asym40"} <= set(runs)
    assert runs["sym100"].recipe == "cifar10_sym50"
    assert "labels.ratio=1" in runs["sym100"].overrides
    assert runs["asym30"].recipe == "cifar10_asym40"
    assert not any("evaluation" in each for run in runs.values() for each in run.overrides)
    shared = {*plan_runs(EXPERIMENTS["figure3"], (0,)), *plan_runs(EXPERIMENTS["figure7"], (0,))}
    assert shared <= set(runs.values())
