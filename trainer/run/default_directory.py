"""The default run directory for a recipe and its overrides, and other directories that hold the same run."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shards.errors import ConfigError
from shards.repacked import is_packed_again
from trainer.config.data import DataConfig
from trainer.config.schema import Recipe
from trainer.config.shipped import MANIFEST, RESOLVED, recipe_name, run_name
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
    own = Path("runs") / f"{name}-{hash_keys(keys)[:8]}"
    return plain if redo and not own.exists() else own


def find_same_run(path: Path, recipe: Recipe, root: Path) -> Path | None:
    """Find a run that a start in the new directory `root` would repeat: of this recipe, with the same keys and data.

    It is looked for beside `root`, and where the recipe itself is a run's. None if there is none, or if `root` has
    one. path: of the recipe.
    """
    if (root / MANIFEST).exists():
        return None
    folders = sorted(config.parent for config in root.parent.glob(f"*/{RESOLVED}"))
    if path.name == RESOLVED:
        folders.insert(0, path.parent)
    name = recipe_name(path)
    for folder in folders:
        config = folder / RESOLVED
        with suppress(ConfigError):  # not a recipe that this version reads
            is_run = (folder / MANIFEST).exists() and recipe_name(config) == name
            if is_run and _is_same_recipe(recipe, load_recipe(config)):
                return folder
    return None


def _is_same_recipe(recipe: Recipe, resolved: Recipe) -> bool:
    """Whether a run with the resolved recipe is one of this recipe."""
    asked, found = _naming_keys(recipe), _naming_keys(resolved)
    if asked.get("batch.global") == "auto":  # the run has a number, which follows from the data
        del asked["batch.global"], found["batch.global"]
    splits = (recipe.data.splits(), resolved.data.splits())
    return asked == found and all(_is_same_split(splits[0][key], splits[1][key]) for key in splits[0])


def _is_same_split(asked: DataConfig, found: DataConfig) -> bool:
    base, own = Path(asked.shards), Path(found.shards)
    same = asked.model_copy(update={"shards": found.shards}) == found
    return same and (own == base or is_packed_again(base, own))


def _naming_keys(recipe: Recipe) -> Keys:
    """Return the result keys; label files and weights are represented by their paths, as they are read later."""
    paths = {
        "labels.corrections": recipe.labels.corrections,
        "model.pretrained": recipe.model.pretrained or None,
        "model.weights": recipe.model.weights,
    }
    named = {key: value for key, value in paths.items() if value is not None}
    return {**result_keys(recipe), "labels.file": recipe.labels.file, **named}
