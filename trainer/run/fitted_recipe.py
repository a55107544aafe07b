"""Fits a recipe to its training set, and says how long each training is if that is unusual."""

import logging

from shards.sample_index import SampleIndex
from trainer.config.fitting import count_trained, describe_lengths, resolve_batch
from trainer.config.schema import Recipe
from trainer.loading.image_set import limit_ids
from trainer.methods.registry import methods_of

_log = logging.getLogger(__name__)


def fit_recipe(recipe: Recipe, index: SampleIndex) -> Recipe:
    """Return the recipe with numbers for the keys that depend on the size of the training set."""
    return resolve_batch(recipe, count_trained(recipe, len(limit_ids(index, recipe.data.train.limit))))


def describe_trainings(recipe: Recipe, samples: int) -> tuple[list[str], list[str]]:
    """Return notes and warnings about the length of the first folds and of each method. samples: trained on."""
    fold = {"incv": recipe.incv.largest_fold(samples)} if recipe.incv is not None else {}
    return describe_lengths(recipe, fold | {method.name: samples for method in methods_of(recipe)})


def log_trainings(recipe: Recipe, samples: int) -> None:
    notes, warnings = describe_trainings(recipe, samples)
    for note in notes:
        _log.info("%s", note)
    for warning in warnings:
        _log.warning("%s", warning)
