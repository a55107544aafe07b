"""The commands about recipes: `incv validate`, `keys`, `ls` and `cp`."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from shards.errors import ConfigError, suggest_near
from trainer.config.argument_types import path_argument
from trainer.config.key_reference import Section, describe_schema, find_key, format_page, format_text, select_section
from trainer.config.schema import Recipe
from trainer.config.shipped import RECIPES, recipe_path
from trainer.methods.sections import SECTIONS


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    validate = subparsers.add_parser("validate", help="check a recipe and its overrides without running it")
    add_recipe_arguments(validate)
    validate.set_defaults(func=_validate)
    keys = subparsers.add_parser("keys", help="describe the keys of a recipe")
    keys.add_argument("section", nargs="?", metavar="SECTION", help="a section or a key, as incv or batch.global")
    keys.add_argument("--markdown", action="store_true", help="print docs/recipe.md, the page of all built-in keys")
    keys.set_defaults(func=_keys)
    subparsers.add_parser("ls", help="list the shipped recipes").set_defaults(func=_list)
    copy = subparsers.add_parser("cp", help="copy a recipe for editing")
    copy.add_argument("recipe", help="the name of a shipped recipe, or a YAML file")
    copy.add_argument("target", type=path_argument, help="the file to create, for example mine.yaml")
    copy.set_defaults(func=_copy)


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe and its overrides to the parser of a command."""
    parser.add_argument(
        "-c", "--recipe", help="a YAML file, or the name of a shipped recipe; -c may be left out before its name"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="override recipe keys, for example labels.ratio=0.2"
    )


def take_recipe(parsed: argparse.Namespace) -> None:
    """If a command needs a recipe and has no -c, take the first word without `=`, which cannot be an override."""
    if not (hasattr(parsed, "recipe") and hasattr(parsed, "overrides")) or parsed.recipe is not None:
        return
    names = [word for word in parsed.overrides if "=" not in word]
    if not names:
        raise ConfigError("which recipe? Add -c FILE, or the name of a shipped recipe (`incv ls` lists them)")
    parsed.recipe = names[0]
    parsed.overrides.remove(names[0])


def _validate(parsed: argparse.Namespace) -> int:
    path = recipe_path(parsed.recipe)
    from trainer.run.recipe import load_recipe

    recipe = load_recipe(path, parsed.overrides)
    # Imported here: torch takes seconds to import, and a wrong key need not wait for it.
    from trainer.run.recipe_check import check_without_data

    check_without_data(recipe)
    print(f"{path} is valid")
    return 0


def _keys(parsed: argparse.Namespace) -> int:
    # Imported here: a package's method imports torch.
    from trainer.run.recipe import method_sections

    if parsed.markdown:
        if parsed.section is not None:
            raise ConfigError("--markdown prints all sections: leave out the section, or --markdown")
        print(format_page(describe_schema(Recipe, SECTIONS)), end="")
        return 0
    sections = describe_schema(Recipe, method_sections())
    if parsed.section is None:
        print(format_text(sections))
        return 0
    key = find_key(sections, parsed.section)
    selected = select_section(sections, parsed.section) or ([key] if key is not None else [])
    if not selected:
        raise ConfigError(f"no section or key {parsed.section!r}; {_near_names(parsed.section, sections)}")
    print(format_text(selected))
    return 0


def _near_names(given: str, sections: Sequence[Section]) -> str:
    """Return the end of an error message: near matches among sections and keys, then the outermost sections."""
    names = {name for section in sections for name in section.names if name}
    keys = {f"{name}.{key.name}".removeprefix(".") for each in sections for name in each.names for key in each.keys}
    hint = suggest_near(given, sorted(names | keys))
    return f"{hint}{' ' if hint else ''}sections: {', '.join(sorted(name for name in names if '.' not in name))}"


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
