"""Runs what an experiment lacks, side by side in one process, and records each run as soon as it has finished."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shards.errors import ConfigError, renamed_fields
from shards.pack import is_packed
from trainer.config.data import DataConfig
from trainer.config.schema import Recipe
from trainer.config.shipped import RECIPES
from trainer.config.sweep import Variant
from trainer.reproduce.recording import build_records, is_recorded, write_record
from trainer.reproduce.runs import PlannedRun
from trainer.run.data_sets import source_of
from trainer.run.default_directory import default_directory
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import result_keys
from trainer.run.stage_graph import numerics_behind

_log = logging.getLogger(__name__)


def run_planned(
    planned: Sequence[PlannedRun],
    local: Sequence[str],
    records: Path,
    at_once: int,
    runs: Path | None = None,
    data: Path | None = None,
) -> int:
    """Execute the planned runs, `at_once` at a time; returns the exit code.

    local: execution keys for this machine, which may not change results; records: folder to which each finished run
    is recorded; runs: parent of the run directories, None: the default of `incv run`; data: folder of CIFAR-10, None:
    that of the recipes.
    Raises DataError if a data set is missing.
    """
    from trainer.run.sweep_runner import run_sweep

    variants = [_build_variant(run, local, runs, data) for run in planned]
    _require_data([variant.recipe for variant in variants])
    by_root = {variant.root: run for variant, run in zip(variants, planned, strict=True)}

    def record(variant: Variant) -> None:
        run = by_root[variant.root]
        for content in build_records(variant.root, run.command):
            is_part = content["method"] != run.stage
            name = replace(run, row=content["method"]).slug if is_part else run.slug
            if not (is_part and is_recorded(records, content, name)):  # by a run of its own, say
                _log.info("recorded: %s", write_record(records, content, name, replace=True))

    codes = run_sweep(variants, (), None, at_once, on_finish=record)
    return next((code for code in codes if code), 0)


def _build_variant(run: PlannedRun, local: Sequence[str], runs: Path | None, data: Path | None) -> Variant:
    path = RECIPES / f"{run.recipe}.yaml"
    planned = load_recipe(path, run.overrides)
    roots = [] if data is None else [f"{key}.root={data}" for key in planned.data.splits()]
    recipe = load_recipe(path, [*run.overrides, *local, *roots])
    if result_keys(recipe) != result_keys(planned):
        raise ConfigError(
            f"{' '.join(local)} changes the results of {run.recipe}: an experiment takes execution keys only, such "
            "as execution.workers=4"
        )
    root = default_directory(path, recipe, ()) if runs is None else runs / run.slug
    # A run directory of earlier numerics counts as finished, and its record as stale: start another one beside it.
    versions = numerics_behind(run.stage, recipe)
    root = root.with_name("-".join([root.name, *(f"{name}{each}" for name, each in versions.items() if each != 1)]))
    return Variant(run.overrides, recipe, root, run.recipe, run.command, run.slug)


def _require_data(recipes: Sequence[Recipe]) -> None:
    """Raise DataError if a split is neither packed nor at its root."""
    splits: dict[str, tuple[str, DataConfig]] = {}
    for recipe in recipes:
        splits |= {f"{split.shards} {split.root}": (key, split) for key, split in recipe.data.splits().items()}
    for key, split in splits.values():
        if not is_packed(Path(split.shards)):
            with renamed_fields({f"{key}.root": "--data"}):
                source_of(key, split)
