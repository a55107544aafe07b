"""Types of command-line arguments: each converts a text, or says what is wrong with it."""

import argparse
import math
import os
from pathlib import Path


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


def profile_argument(given: str) -> str:
    """What --profile measures; an override right after a plain --profile passes, and `incv` puts it in its place."""
    if given not in ("summary", "trace") and "=" not in given:
        raise argparse.ArgumentTypeError(f"{given!r} is neither `summary` nor `trace`")
    return given
