"""Types and actions of command-line arguments: each converts a text, or says what is wrong with it."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def path_argument(given: str) -> Path:
    """A path; `~` is expanded here too, because a shell leaves the one in `--out=~/photos` alone."""
    return Path(os.path.expanduser(given))


def count_argument(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number above 0")
    return int(given)


def counts_argument(given: str) -> tuple[int, ...]:
    return tuple(count_argument(number) for number in given.split(","))


def price_argument(given: str) -> float:
    try:
        price = float(given)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r} is not a price")
    return price


def probability_argument(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a probability from 0 to 1")
    return value


class TakeWords(argparse.Action):
    """A positional argument for all words that are no options; CommandParser passes on those between options."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options | {"nargs": "*", "default": ()})

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *values])


class TakeProfile(argparse.Action):
    """`--profile`; the word `trace` may follow. An override right after it is one of the overrides."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, **options | {"nargs": "?", "default": False, "const": "trace"})

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        if "=" in values:
            namespace.overrides = [*namespace.overrides, values]
        elif values != "trace":
            raise argparse.ArgumentError(self, f"{values!r} is neither `trace` nor an override")
        setattr(namespace, self.dest, True)
