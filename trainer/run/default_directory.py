"""The default run directory for a recipe and its overrides."""

from collections.abc import Sequence
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.schema import Recipe
from trainer.config.shipped import RESOLVED, run_name
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import Keys, hash_keys, result_keys


def default_directory(path: Path, recipe: Recipe, redo: Sequence[str]) -> Path:
    """Return runs/<recipe>; if an override changes a result key, 8 digits of the keys' hash are appended.

    With --redo and changed keys, return the existing run with these keys, or else runs/<recipe>, to redo its stages.
    """
    name = run_name(path)
    keys, plain = _naming_keys(recipe), Path("runs") / name
    try:
        if keys == _naming_keys(load_recipe(path)):
            return plain
    except ConfigError:  # the recipe is incomplete without its overrides
        pass
    own = _find_run(name, keys) or Path("runs") / f"{name}-{hash_keys(keys)[:8]}"
    return plain if redo and not own.exists() else own


def _find_run(name: str, keys: Keys) -> Path | None:
    """Find an existing run with these keys, whatever hash its name has: older versions hashed differently."""
    for config in sorted(Path("runs").glob(f"{name}-????????/{RESOLVED}")):
        try:
            if _naming_keys(load_recipe(config)) == keys:
                return config.parent
        except ConfigError:  # written by a version with other keys
            continue
    return None


def _naming_keys(recipe: Recipe) -> Keys:
    """Return the result keys; label files and weights are represented by their paths, as they are read later."""
    paths = {
        "labels.corrections": recipe.labels.corrections,
        "model.pretrained": recipe.model.pretrained or None,
        "model.weights": recipe.model.weights,
    }
    named = {key: value for key, value in paths.items() if value is not None}
    return {**result_keys(recipe), "labels.file": recipe.labels.file, **named}
