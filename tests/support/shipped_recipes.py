"""The shipped recipes by name."""

from collections.abc import Sequence

from tests.support import RECIPES
from trainer.config.schema import Recipe
from trainer.run.recipe import load_recipe


def shipped(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """recipes/<name>.yaml with these `key=value` on top."""
    return load_recipe(RECIPES / f"{name}.yaml", list(overrides))
