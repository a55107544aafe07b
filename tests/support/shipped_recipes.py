"""The shipped recipes by name."""

from collections.abc import Sequence

from tests.support import RECIPES
from trainer.config.recipe_file import load_recipe
from trainer.config.schema import Recipe


def shipped(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """recipes/<name>.yaml with these `key=value` on top."""
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))
