"""`incv completion`: a script that completes commands, options, recipes and files in a shell."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shards.errors import ConfigError
from trainer.config.argument_types import path_argument
from trainer.config.shipped import RECIPES

SHELLS = ("bash", "zsh")
_FILE = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_RECIPE = {"bash": "_incv_recipes", "zsh": "_incv_recipes"}
_PREAMBLES = {
    "bash": '_incv_recipes() {{ compgen -W "{names}" -- "$1"; _shtab_compgen_files "$1"; }}',
    "zsh": "_incv_recipes() {{ _alternative 'recipes:recipe:({names})' 'files:file:_files'; }}",
}


def add_command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", parser: argparse.ArgumentParser
) -> None:
    """Add the command. parser: the parser of `incv`, which the script describes."""
    completion = subparsers.add_parser("completion", help="print a completion script for bash or zsh")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(func=partial(_complete, parser))


def _complete(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    print(completion_script(parser, parsed.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script. It is static: completing starts no Python."""
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            "the package shtab, which writes completion scripts, is not installed: run `pip install shtab`"
        ) from None
    for action in _actions(parser):
        how: Any = _RECIPE if action.dest == "recipe" else _FILE if action.type in (Path, path_argument) else None
        if how is not None:
            action.complete = how  # type: ignore[attr-defined]  # read by shtab
    names = " ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
    script: str = shtab.complete(parser, shell, preamble=_PREAMBLES[shell].format(names=names))
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _actions(command)
        else:
            yield action
