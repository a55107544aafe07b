"""The commands about recipes: `incv validate`, `ls` and `cp`."""

import argparse
import shutil
from pathlib import Path

from shards.errors import ConfigError
from trainer.config.shipped import RECIPES, recipe_path


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    validate = subparsers.add_parser("validate", help="check a recipe and its overrides without running it")
    add_recipe_arguments(validate)
    validate.set_defaults(func=_validate)
    subparsers.add_parser("ls", help="list the shipped recipes").set_defaults(func=_list)
    copy = subparsers.add_parser("cp", help="copy a recipe for editing")
    copy.add_argument("recipe", help="the name of a shipped recipe, or a YAML file")
    copy.add_argument("target", type=Path, help="the file to create, for example mine.yaml")
    copy.set_defaults(func=_copy)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides to the parser of a command."""
    parser.add_argument("-c", "--recipe", required=True, help="a YAML file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="override recipe keys, for example labels.ratio=0.2"
    )


def _validate(parsed: argparse.Namespace) -> int:
    path = recipe_path(parsed.recipe)
    from trainer.models.factory import require_known_model
    from trainer.run.recipe import load_recipe

    recipe = load_recipe(path, parsed.overrides)
    require_known_model(recipe.model.name)
    print(f"{path} is valid")
    return 0


def _list(_parsed: argparse.Namespace) -> int:
    for file in sorted(RECIPES.glob("*.yaml")):
        first = file.read_text().splitlines()[0].lstrip("# ").strip()
        print(f"{file.stem:<22} {first}")
    return 0


def _copy(parsed: argparse.Namespace) -> int:
    target: Path = parsed.target
    if target.exists():
        raise ConfigError(f"{target} exists: choose another name, or remove it first")
    source = recipe_path(parsed.recipe)
    if not source.exists():
        raise ConfigError(f"no recipe {source}")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another name") from None
    print(f"copied {source.name} to {target}; run it with `incv run -c {target}`")
    return 0
