"""The recipes that incv ships, and how a recipe given on the command line is found."""

from pathlib import Path

from shards.errors import ConfigError, did_you_mean
from trainer.config.argument_types import path_argument

RECIPES = Path(__file__).parents[2] / "recipes"
RESOLVED = "config.resolved.yaml"
"""The file of a run directory that has all keys of its recipe, with the overrides; it can be run as a recipe."""


def recipe_name(path: Path) -> str:
    """The name of a recipe, for its runs: that of the file, or of the run directory for a run's resolved recipe."""
    return path.absolute().parent.name if path.name == RESOLVED else path.stem


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
