"""Writes the report of a run with its images: as the last stage of a run, or of any run directory as it is."""

from pathlib import Path
from typing import Any

from PIL import Image

from shards.errors import ConfigError, InputError
from shards.image_check import decode_rgb
from shards.sample_index import SampleIndex
from trainer.config.schema import Recipe
from trainer.loading.shard_reader import ShardReader
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.run import Missing, ReportRun, find_sources
from trainer.run.data_sets import find_key_root
from trainer.run.recipe import load_recipe


def write_run_report(run: RunDirectory, recipe: Recipe, index: SampleIndex) -> dict[str, Any]:
    """Write report.json and report.html of a run, with the images of its training set; returns the report."""
    keys = index.read_table(["key"])["key"]
    reader = ShardReader(index)
    try:
        return write_report(
            run,
            image_of=lambda sample_id: Image.fromarray(decode_rgb(reader.read(sample_id))),
            keys=keys,
            key_root=find_key_root(recipe.data.train),
            sources=find_sources(keys, index.label),
            class_names=index.class_names,
        )
    finally:
        reader.close()


def report_directory(root: Path) -> dict[str, Any]:
    """Write the report of a run directory that may be unfinished or lack files; the report names what is missing.

    Raises ConfigError if `root` has no file of a run.
    """
    run = RunDirectory(root)
    if not run.has_results():
        raise ConfigError(
            f"{root} is not a run directory: it has neither manifest.json nor labels, rounds or methods of a run"
        )
    try:
        recipe = load_recipe(run.config)
        index = _open_shards(run, recipe)
    except (InputError, OSError) as error:
        return write_report(run, gaps={"shards": f"The images cannot be shown: {error}."})
    return write_run_report(run, recipe, index)


def _open_shards(run: RunDirectory, recipe: Recipe) -> SampleIndex:
    """Open the training set; raises DataError or ConfigError if it is missing or not that of the run."""
    index = SampleIndex.load(Path(recipe.data.train.shards))
    labels = ReportRun(run).read(run.labels)
    if not isinstance(labels, Missing) and labels["sample_id"].to_numpy().max(initial=-1) >= len(index):
        raise ConfigError(f"{index.folder} has fewer samples than this run, so it was packed again")
    return index
