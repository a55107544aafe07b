"""The recipes that incv ships, and how a recipe given on the command line is found."""

from contextlib import suppress
from pathlib import Path

from shards.durable import read_json
from shards.errors import ConfigError, DataError, did_you_mean
from trainer.config.argument_types import path_argument

RECIPES = Path(__file__).parents[2] / "recipes"
RESOLVED = "config.resolved.yaml"
"""The file of a run directory that has all keys of its recipe, with the overrides; it can be run as a recipe."""


MANIFEST = "manifest.json"
"""The file of a run directory that names its recipe, and lists its starts and stages."""


def recipe_name(path: Path) -> str:
    """The name of a recipe, which its runs record: that of the file, or that of the run for its resolved recipe."""
    if path.name != RESOLVED:
        return path.stem
    with suppress(DataError, OSError, KeyError, TypeError):  # the file may have been copied to another folder
        if isinstance(name := read_json(path.with_name(MANIFEST))["recipe"], str):
            return name
    return run_name(path)


def run_name(path: Path) -> str:
    """The name for new runs of a recipe: that of the file, or of the run directory for a run's resolved recipe."""
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
