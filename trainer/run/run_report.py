"""Writes the report of a run with its images, as a stage or of any run directory, and the labels to review."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from PIL import Image

from shards.durable import read_json, read_parquet
from shards.errors import ConfigError, InputError
from shards.image_check import decode_rgb
from shards.sample_index import SampleIndex
from trainer.config.schema import Recipe
from trainer.incv.selection_index import SelectionIndex
from trainer.loading.shard_reader import ShardReader
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import read_labels
from trainer.report import write_report
from trainer.report.labels_review import ReviewedSamples, build_review, write_review
from trainer.report.run import Missing, ReportRun, find_sources, is_calibrated
from trainer.run.data_sets import find_key_root
from trainer.run.recipe import load_recipe

if TYPE_CHECKING:
    from trainer.run.stages import StageRunner


def report_run(stages: "StageRunner", name: str) -> None:
    """Write the report as the last stage of a run, and the list of labels to review if it was lost."""
    run = stages.run
    listed = run.labels_review_csv.exists() and run.labels_review_parquet.exists()
    if stages.recipe.incv is not None and not listed:
        write_review(run, list_reviewed_labels(stages), keep_existing=True)
    write_run_report(run, stages.recipe, stages.data.train)


def list_reviewed_labels(stages: "StageRunner") -> pa.Table:
    """Return the list of labels to review, from the last selection."""
    run, index = stages.run, stages.data.train
    selection, labels = SelectionIndex.read(run.selection), read_labels(run.labels)
    rejected = index.verdict != 0
    samples = ReviewedSamples(
        keys=index.read_table(["key"])["key"],
        given=np.where(rejected, index.label, labels.by_id(len(index))),
        rejected=rejected,
        excluded=np.isin(index.sample_id, stages.data.labels.excluded),
        checked=labels.checked_by_id(len(index)),
        class_names=index.class_names,
        root=find_key_root(stages.recipe.data.train),
        examined=read_parquet(run.examination, "examination") if run.examination.exists() else None,
        calibrated=is_calibrated(read_json(run.incv)),
    )
    return build_review(selection, samples)


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
