"""Checks before the first stage that find errors which would otherwise end a run hours later.

Those that need no data are also made by `incv validate`.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shards.errors import ConfigError, DataError
from shards.pack import is_packed
from shards.sample_index import SampleIndex
from shards.sources import find_source
from trainer.acceleration.policy import check_acceleration
from trainer.config.fitting import count_trained, describe_lengths, resolve_batch
from trainer.config.schema import Recipe, TrainingConfig
from trainer.distributed.world import World
from trainer.incv.folds import folds_side_by_side
from trainer.loading.image_set import check_loader, limit_ids
from trainer.loading.sample_order import Ids
from trainer.methods.registry import methods_of
from trainer.models.weights import Weights, find_weights
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import Labels
from trainer.records.trackers import require_trackers
from trainer.run.data_sets import find_folders
from trainer.run.given_arrays import check_given, given_checksum, given_files
from trainer.run.label_file import EXCLUDED, file_checksum, read_corrections
from trainer.run.labels import make_labels, overlay_corrections, require_every_class, split_held_out
from trainer.run.network_check import check_network
from trainer.run.noise_kinds import build_transition
from trainer.training.engines.deepspeed import deepspeed_stage

_ANY_CLASSES = 10  # if the number is unknown until the data are read; networks take any number
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunLabels:
    """The sample_ids of a run, ascending, and their labels in the same order."""

    ids: Ids
    given: Labels
    true: Labels | None
    """None if unknown."""
    excluded: Ids
    """The sample_ids that `labels.corrections` excludes from the run, ascending."""
    corrected: int
    """How many labels `labels.corrections` changes."""
    checked: Ids
    """Those of `ids` whose label was checked by hand: corrected or confirmed by `labels.corrections`, ascending."""
    held_out: Ids
    """Those of `ids` that no network trains on (`data.eval_fraction`), ascending."""

    @property
    def confirmed(self) -> int:
        """How many labels `labels.corrections` confirms."""
        return len(self.checked) - self.corrected

    @property
    def trained(self) -> Ids:
        """Those of `ids` that networks train on, ascending."""
        return np.setdiff1d(self.ids, self.held_out, assume_unique=True)


@dataclass(frozen=True)
class RunData:
    """The packed splits, labels and initial weights of a run, after all checks."""

    train: SampleIndex
    eval: dict[str, SampleIndex]
    labels: RunLabels
    weights: Weights | None = None
    """None: the networks start from random weights."""


def check_before_packing(recipe: Recipe, run: RunDirectory, weights: Weights | None) -> None:
    """If there is something to pack, raise InputError for what would be refused after it. weights: as found."""
    if all(is_packed(folder) for folder in find_folders(recipe, run).values()):
        return
    run.require_writable()
    check_without_data(recipe, weights)


def check_without_data(recipe: Recipe, weights: Weights | None = None) -> None:
    """Raise InputError if a run of this recipe would be refused on any machine and with any data.

    Checks sources, label files, initial weights, network and optimisers; downloads nothing. weights: the initial
    weights, if they have been read already.
    """
    require_trackers(recipe.execution.trackers)
    for split in (recipe.data.train, *recipe.data.eval.values()):
        find_source(split.source)
    for key in ("file", "corrections"):
        path = getattr(recipe.labels, key)
        if path is not None:
            file_checksum(Path(path), f"labels.{key}")
    for key, path in given_files(recipe).items():
        given_checksum(key, path)
    classes, world, batch = recipe.data.train.classes, recipe.execution.world, recipe.batch.global_
    if classes is not None:
        build_transition(recipe.labels, classes)
    if world is not None and batch != "auto":  # auto is known only with the data
        if world > batch:
            raise ConfigError(
                f"execution.world = {world} processes cannot share batch.global = {batch} rows: some have none; "
                "lower execution.world, or raise batch.global"
            )
        check_rows(recipe, world)
    if weights is None:
        weights = find_weights(recipe.model, download=False)
    check_network(recipe, classes or _ANY_CLASSES, weights)


def fit_recipe(recipe: Recipe, index: SampleIndex) -> Recipe:
    """Return the recipe with numbers for the keys that depend on the size of the training set."""
    return resolve_batch(recipe, count_trained(recipe, len(limit_ids(index, recipe.data.train.limit))))


def describe_trainings(recipe: Recipe, samples: int) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the length of the first folds and of each method. samples: trained on."""
    trains = recipe.incv is not None and recipe.incv.judge == "networks"
    fold = {"incv": recipe.incv.largest_fold(samples)} if recipe.incv is not None and trains else {}
    return describe_lengths(recipe, fold | {method.name: samples for method in methods_of(recipe)})


def log_trainings(recipe: Recipe, samples: int) -> None:
    notes, warnings = describe_trainings(recipe, samples)
    for note in notes:
        _log.info("%s", note)
    for warning in warnings:
        _log.warning("%s", warning)


def preflight(recipe: Recipe, index: SampleIndex, world: World, weights: Weights | None = None) -> RunLabels:
    """Check that labels, network and optimisers suit the data set and the number of ranks; returns the labels."""
    require_trackers(recipe.execution.trackers)
    check_rows(recipe, world.size)
    _check_ranks(recipe, world)
    check_acceleration(recipe, world)
    ids = limit_ids(index, recipe.data.train.limit)
    check_loader(index, ids, recipe.image, recipe.execution)
    labels = _checked_labels(recipe, index, ids)
    _check_incv(recipe, index, len(labels.trained))
    check_given(recipe, index, labels.ids, labels.given)
    check_network(recipe, index.num_classes, weights)
    return labels


def preflight_evaluation(recipe: Recipe, indices: Mapping[str, SampleIndex]) -> None:
    """Check that the recipe's loader can also load the evaluation sets."""
    for name, index in indices.items():
        check_loader(index, limit_ids(index, recipe.data.eval[name].limit), recipe.image, recipe.execution)


def check_rows(recipe: Recipe, ranks: int) -> None:
    """Check that every method supports the recipe's `batch.micro` on this number of ranks."""
    for method in methods_of(recipe):
        method.validate_rows(recipe, ranks)


def refuse_own_list(recipe: Recipe, run: RunDirectory) -> None:
    """Raise ConfigError if `labels.corrections` is the list of the run itself, which `--redo` would move away."""
    given = recipe.labels.corrections
    if given is not None and Path(given).resolve() == run.labels_review_csv.resolve():
        raise ConfigError(
            f"labels.corrections = {given} is a file that this run itself writes: copy it and set labels.corrections "
            "to the copy, or choose another --run-dir"
        )


def refuse_other_recipe(run: RunDirectory, name: str) -> None:
    """Raise ConfigError if the directory belongs to a run of another recipe, or to none."""
    run.require_run_directory()
    if run.manifest.exists():
        other = Manifest(run).content["recipe"]
        if other not in (None, name):
            raise ConfigError(
                f"{run.root} is a run of the recipe {other!r}, not of {name!r}: choose another --run-dir"
            )


def _training_sections(recipe: Recipe) -> list[TrainingConfig]:
    return [method.config(recipe) for method in methods_of(recipe)]


def _check_ranks(recipe: Recipe, world: World) -> None:
    """Check what depends on the number of processes, the device or the engine."""
    if world.size > recipe.batch.rows:
        raise ConfigError(
            f"{world.size} processes cannot share batch.global = {recipe.batch.rows} rows: some would have none; "
            "start fewer processes, or raise batch.global"
        )
    if recipe.incv is not None:
        folds_side_by_side(recipe.incv.trained_folds, recipe.execution, world)
    if recipe.model.sync_batchnorm and world.device.type != "cuda":
        raise ConfigError("model.sync_batchnorm works on GPUs only: set it to false")
    if world.launcher != "accelerate" or deepspeed_stage(os.environ) is None:
        return
    if any(section.optimizer.clip for section in _training_sections(recipe)):
        raise ConfigError(
            "optimizer.clip clips the gradient of each network separately, but DeepSpeed stores the gradients of all "
            "networks together: set optimizer.clip to null, or start without DeepSpeed"
        )
    if any(section.ema for section in _training_sections(recipe)):
        raise ConfigError(
            "ema averages the weights after each step, which is not supported with DeepSpeed: set ema to null, or "
            "start without DeepSpeed"
        )
    if recipe.precision == "fp16":
        raise ConfigError(
            "precision: fp16 needs loss scaling, which is not supported with DeepSpeed: use bf16, or no DeepSpeed"
        )


def _checked_labels(recipe: Recipe, index: SampleIndex, ids: Ids) -> RunLabels:
    before, true = make_labels(recipe.labels, recipe.seed, index, ids)
    given, checked = before, np.zeros(len(ids), bool)
    if recipe.labels.corrections is not None:
        corrections = read_corrections(Path(recipe.labels.corrections), index)
        given, checked = overlay_corrections(before, ids, corrections)
    kept = given != EXCLUDED
    # Split by the labels before corrections, so that correcting labels does not move samples between the two parts.
    held_out = np.isin(ids, split_held_out(recipe.seed, ids, before, recipe.data.eval_fraction)) & kept
    if recipe.data.eval_fraction and not held_out.any():
        raise DataError(
            f"data.eval_fraction = {recipe.data.eval_fraction:g} holds out no sample: every class has too few. Raise "
            "it, or set it to 0"
        )
    trained = kept & ~held_out
    if trained.sum() < recipe.batch.rows:
        reasons = {"are excluded by labels.corrections": ~kept, "are held out by data.eval_fraction": held_out}
        others = ", ".join(f"{mask.sum()} {why}" for why, mask in reasons.items() if mask.any())
        raise DataError(
            f"the data set has {trained.sum()} training samples{f' ({others})' if others else ''}, fewer than "
            f"batch.global = {recipe.batch.rows}: lower batch.global, or use more samples (data.train.limit)"
        )
    require_every_class(given[trained], index.class_names)
    return RunLabels(
        ids=ids[kept],
        given=given[kept],
        true=None if true is None else true[kept],
        excluded=ids[~kept],
        corrected=int((given != before)[kept].sum()),
        checked=ids[checked],
        held_out=ids[held_out],
    )


def _check_incv(recipe: Recipe, index: SampleIndex, samples: int) -> None:
    if recipe.incv is None:
        return
    if samples < recipe.incv.folds:
        raise DataError(
            f"INCV with incv.folds = {recipe.incv.folds} needs at least as many usable samples, but the data set has "
            f"only {samples}"
        )
    if recipe.incv.agree_top_k >= index.num_classes:
        raise ConfigError(
            f"incv.agree_top_k = {recipe.incv.agree_top_k} with {index.num_classes} classes: all labels would agree; "
            "choose a smaller number"
        )
