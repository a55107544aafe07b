"""The arguments that name a recipe and its run, and the commands `incv validate`, `keys`, `ls` and `cp`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shards.errors import ConfigError, suggest_near
from shards.regular_file import read_regular
from trainer.config.argument_types import (
    TakeProfile,
    TakeWords,
    count_argument,
    counts_argument,
    path_argument,
    price_argument,
)
from trainer.config.key_reference import (
    Section,
    describe_schema,
    find_key,
    format_main_keys,
    format_page,
    format_text,
    select_section,
)
from trainer.config.schema import Recipe
from trainer.config.shipped import RECIPES, recipe_path
from trainer.methods.registry import METHODS, get_method

PRINTED = {
    "run-dir": "the run directory that these arguments would use",
    "stages": "the stages of the recipe",
    "splits": "one line per split (recipe key, shards folder, arguments for `incv shards pack`)",
}
"""The facts that `--print-<name>` prints."""


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands; each sets `func`, which takes the parsed arguments and returns an exit code."""
    validate = subparsers.add_parser("validate", help="check a recipe and its overrides without running it")
    add_recipe_arguments(validate)
    validate.set_defaults(func=_validate)
    keys = subparsers.add_parser("keys", help="describe the keys of a recipe")
    keys.add_argument("section", nargs="?", metavar="SECTION", help="a section or a key, as incv or batch.global")
    keys.add_argument("--all", action="store_true", help="describe all keys, not only those that matter most")
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
        "overrides", action=TakeWords, metavar="KEY=VALUE", help="override recipe keys, for example labels.ratio=0.2"
    )


def take_recipe(parsed: argparse.Namespace) -> None:
    """Without -c, take the first word without `=`, which cannot be an override, for the recipe."""
    if parsed.recipe is not None:
        return
    names = [word for word in parsed.overrides if "=" not in word]
    if not names:
        raise ConfigError("which recipe? Add -c FILE, or the name of a shipped recipe (`incv ls` lists them)")
    parsed.recipe = names[0]
    parsed.overrides.remove(names[0])


def add_run_arguments(parser: argparse.ArgumentParser, stage: str | None = None) -> None:
    """Add the options of a run. stage: the only stage that the command runs; None: all."""
    parser.set_defaults(incv_from=None)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--run-dir",
        type=path_argument,
        help="where to write; default: runs/<recipe>, plus a hash if overrides change results",
    )
    parser.add_argument(
        "--redo",
        action="append",
        default=[],
        metavar="STAGE",
        help="rerun a finished stage and those that depend on it; `pack` packs changed images into a new folder and "
        "reruns the stages that read them; repeatable",
    )
    if stage in (None, "incv"):
        parser.add_argument(
            "--incv-from",
            type=path_argument,
            metavar="RUN_DIR",
            help="take over the finished INCV stage of another run instead of running it; both must have the same "
            "data and the same values of all keys that INCV depends on",
        )
    parser.add_argument(
        "--check-source",
        action="store_true",
        help="compare more than 200,000 image files with what was packed too; fewer are always compared",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan with its estimated time and cost, and exit"
    )
    parser.add_argument(
        "--profile",
        action=TakeProfile,
        metavar="trace",
        help="write a torch.profiler trace of a few steps of each training run",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=V,W",
        help="start one run per value, concurrently in one process; if repeated, one per combination",
    )
    parser.add_argument(
        "--at-once", type=count_argument, metavar="N", help="maximum number of --vary runs at a time; default: 8"
    )
    estimate = parser.add_argument_group("options for --dry-run")
    estimate.add_argument(
        "--gpus",
        type=counts_argument,
        metavar="1,8,64",
        help="GPU counts to estimate; default: the number of processes",
    )
    estimate.add_argument(
        "--gpu-price", type=price_argument, metavar="DOLLARS", help="price of a GPU hour; default: 4"
    )
    estimate.add_argument(
        "--samples",
        type=count_argument,
        metavar="N",
        help="number of training samples; default: as packed, otherwise the published size of the data set",
    )
    estimate.add_argument("--probe", action="store_true", help="measure this machine with a few steps")
    for what, described in PRINTED.items():
        parser.add_argument(f"--print-{what}", action="store_true", help=f"print {described} and exit")


def take_estimate_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the estimate that were given; raises ConfigError without --dry-run."""
    given = {"gpus": parsed.gpus, "price": parsed.gpu_price, "samples": parsed.samples, "probe": parsed.probe or None}
    asked = {name: value for name, value in given.items() if value is not None}
    if asked and not parsed.dry_run:
        raise ConfigError(
            "--gpus, --gpu-price, --samples and --probe are for the estimate of --dry-run: add it, or leave them"
        )
    if parsed.probe and parsed.gpus:
        raise ConfigError("--probe measures this machine, and --gpus estimates for others: leave out one of them")
    return asked


def _validate(parsed: argparse.Namespace) -> int:
    take_recipe(parsed)
    path = recipe_path(parsed.recipe)
    from trainer.run.recipe import load_recipe

    recipe = load_recipe(path, parsed.overrides)
    # Imported here: torch takes seconds to import, and a wrong key need not wait for it.
    from trainer.run.preflight import check_without_data

    check_without_data(recipe)
    print(f"{path} is valid")
    return 0


def _keys(parsed: argparse.Namespace) -> int:
    # Imported here: a package's method imports torch.
    from trainer.run.recipe import method_sections

    if parsed.markdown:
        if parsed.section is not None:
            raise ConfigError("--markdown prints all sections: leave out the section, or --markdown")
        built_in = {name: get_method(name).section for name in METHODS.built_in}
        print(format_page(describe_schema(Recipe, built_in)), end="")
        return 0
    sections = describe_schema(Recipe, method_sections())
    if parsed.section is None:
        print(format_text(sections) if parsed.all else format_main_keys(sections))
        return 0
    if parsed.all:
        raise ConfigError("--all describes all sections: leave out the section, or --all")
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
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: choose another name, or remove it first")
    source = recipe_path(parsed.recipe)
    if not source.exists():
        raise ConfigError(f"no recipe {source}")
    content = read_regular(source)
    try:
        with target.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; choose another name") from None
    print(f"copied {source.name} to {target}; run it with `incv run -c {target}`")
    return 0
