"""The runs that an experiment needs; pure functions."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.reproduce.experiments import RECORDED_WITH, TEST, WEBVISION, Experiment, Row, Setting


@dataclass(frozen=True)
class PlannedRun:
    """One run that an experiment needs."""

    row: str
    setting: str
    seed: int
    recipe: str
    stage: str
    overrides: tuple[str, ...]
    also: tuple[str, ...] = ()
    """As in `Row`."""
    evaluation_set: str = TEST
    """As in `Experiment`."""

    @property
    def slug(self) -> str:
        """The name of the run, which its record and its log lines have."""
        return f"{self.recipe.partition('_')[0]}_{self.setting}-{self.row}-seed{self.seed}"

    @property
    def command(self) -> str:
        """The command that executes this run alone."""
        return shlex.join(["incv", "run", "-c", self.recipe, *self.overrides])

    def with_overrides(self, extra: Sequence[str]) -> "PlannedRun":
        return replace(self, overrides=(*self.overrides, *extra))


def plan_runs(experiment: Experiment, seeds: Sequence[int]) -> list[PlannedRun]:
    """Return the runs that an experiment needs, seed by seed: the first seed of all cells comes first."""
    return [
        _plan_run(row, setting, seed, experiment.evaluation_set)
        for seed in seeds
        for row, setting in iterate_cells(experiment)
    ]


def iterate_cells(experiment: Experiment) -> Iterator[tuple[Row, Setting]]:
    for row in experiment.rows:
        for setting in experiment.settings:
            yield row, setting


def _plan_run(row: Row, setting: Setting, seed: int, evaluation_set: str) -> PlannedRun:
    overrides = (f"seed={seed}", *row.overrides, *setting.overrides, *RECORDED_WITH)
    if setting in WEBVISION:
        overrides = (f"seed={seed}", *row.overrides)  # the recipe has the rest
    if row.stage == "incv":  # it trains no method that could be evaluated
        overrides = tuple(each for each in overrides if not each.startswith("evaluation."))
    recipe = setting.recipe + row.suffix
    return PlannedRun(row.name, setting.name, seed, recipe, row.stage, overrides, row.also, evaluation_set)


def drop_parts(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the different runs among these, without those that are part of another one of them."""
    parts = {(row, run.setting, run.seed) for run in runs for row in run.also}
    return [run for run in dict.fromkeys(runs) if (run.row, run.setting, run.seed) not in parts]
