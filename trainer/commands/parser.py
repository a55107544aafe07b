"""The parser of the command line: mistakes in one line, with near matches for commands, choices and options; versions
and completion.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shards.errors import ConfigError, suggest_near
from trainer.config.argument_types import TakeWords, path_argument
from trainer.config.shipped import RECIPES
from trainer.records.manifest import installed_versions

_VERSIONS = ("incv", "torch", "timm")
FIRST = ("run", "audit", "clean", "predict", "report", "ls", "cp")
"""The commands that people need first, in their order in `incv --help`."""
SHELLS = ("bash", "zsh")
_FILE = {"bash": "_shtab_compgen_files", "zsh": "_files"}
_RECIPE = {"bash": "_incv_recipes", "zsh": "_incv_recipes"}
_PREAMBLES = {
    "bash": '_incv_recipes() {{ compgen -W "{names}" -- "$1"; _shtab_compgen_files "$1"; }}',
    "zsh": "_incv_recipes() {{ _alternative 'recipes:recipe:({names})' 'files:file:_files'; }}",
}


class _Help(argparse.HelpFormatter):
    """Sets off the commands to begin with from the others."""

    def _format_action(self, action: argparse.Action) -> str:
        return super()._format_action(action) + ("\nother commands:\n" if action.dest == FIRST[-1] else "")


class _Commands(argparse._SubParsersAction):
    """The commands of a parser; `COMMAND --help` begins with the line that the list of commands has."""

    def _get_subactions(self) -> list[argparse.Action]:
        """Return the commands as the help lists them: those to begin with come first."""
        return sorted(super()._get_subactions(), key=lambda each: (*FIRST, each.dest).index(each.dest))

    def add_parser(self, name: str, **options: Any) -> Any:
        if line := options.get("help"):
            options.setdefault("description", f"{line[0].upper()}{line[1:]}.")
        return super().add_parser(name, **options)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests near matches (argparse itself can from Python 3.14 on); so do its commands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": _Help, **options})
        self.register("action", "parsers", _Commands)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit; the usage of a command with many options would hide it."""
        self.exit(2, f"incv: error: {message} (`{self.prog} --help` describes the arguments)\n")

    def parse_known_args(  # type: ignore[override]  # argparse declares overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse unknown options and words that no argument takes."""
        parsed, rest = super().parse_known_args(args, namespace)
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if unknown:
            self.error(f"`{self.prog}` has no option {unknown[0]}{_suggest(unknown[0], self._option_string_actions)}")
        for action in self._actions:
            if isinstance(action, TakeWords):  # argparse finds only the words between two options, or after the last
                action(self, parsed, rest)
                rest = []
        if rest:
            self.error(f"unexpected arguments: {' '.join(rest)}")
        return parsed, []

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = sorted(str(choice) for choice in action.choices)
        is_command = isinstance(action, argparse._SubParsersAction)
        what = f"command {value!r}" if is_command else f"value {value!r} for {_name(action)}"
        self.error(f"`{self.prog}` has no {what}{_suggest(str(value), names)} Known: {', '.join(names)}")


def _suggest(given: str, known: Iterable[str]) -> str:
    """Return the end of a sentence: near matches, if there are any."""
    hint = suggest_near(given, known, most=2)
    return f"; {hint}" if hint else "."


def _name(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or action.dest


class ShowVersion(argparse.Action):
    """Prints the versions and exits. They come from the packages' metadata: importing torch would take seconds."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_arguments: Any) -> None:
        print(describe_version())
        parser.exit()


def describe_version() -> str:
    """Return one line, such as `incv 0.1.0 (torch 2.14.1, timm 1.0.30, python 3.11.7)`."""
    found = installed_versions(_VERSIONS)
    others = [f"{name} {found.get(name, 'not installed')}" for name in (*_VERSIONS[1:], "python")]
    return f"incv {found.get('incv', 'not installed')} ({', '.join(others)})"


def add_completion(
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
