"""The parser of the command line: mistakes in one line, with near matches for commands, choices and options."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shards.errors import suggest_near


class _Commands(argparse._SubParsersAction):
    """The commands of a parser; `COMMAND --help` begins with the line that the list of commands has."""

    def add_parser(self, name: str, **options: Any) -> Any:
        if line := options.get("help"):
            options.setdefault("description", f"{line[0].upper()}{line[1:]}.")
        return super().add_parser(name, **options)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests near matches (argparse itself can from Python 3.14 on); so do its commands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", "parsers", _Commands)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit; the usage of a command with many options would hide it."""
        self.exit(2, f"incv: error: {message} (`{self.prog} --help` describes the arguments)\n")

    def parse_known_args(  # type: ignore[override]  # argparse declares overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse, and refuse unknown options; other words that no argument takes are returned."""
        parsed, rest = super().parse_known_args(args, namespace)
        unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if unknown:
            self.error(f"`{self.prog}` has no option {unknown[0]}{_suggest(unknown[0], self._option_string_actions)}")
        return parsed, rest

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
