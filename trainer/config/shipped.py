"""The recipes that incv ships, and how a recipe given on the command line is found."""

from pathlib import Path

from shards.errors import ConfigError, did_you_mean
from trainer.config.argument_types import path_argument

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe_path(given: str) -> Path:
    """The path of a recipe, given as a file or as the name of a shipped recipe."""
    path = path_argument(given)
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return path
    shipped = RECIPES / f"{given}.yaml"
    if not shipped.exists():
        names = [file.stem for file in RECIPES.glob("*.yaml")]
        raise ConfigError(f"no recipe {given!r}: neither a file nor a shipped recipe; {did_you_mean(given, names)}")
    return shipped
