"""Errors that the user can correct, each with its exit code, and parts of their messages."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


class CommandStopped(Exception):
    """A command was stopped on request. The message says what is kept and how to continue."""


class InputError(Exception):
    """Invalid input. The message says what is wrong, why, and what to do next."""

    exit_code = 1


class ConfigError(InputError):
    """An invalid recipe, override or command line."""

    exit_code = 2


class DataError(InputError):
    """Unusable images, shards, labels or checkpoints, or an unusable disk."""

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: near matches, then all known names."""
    names = sorted(known)
    hint = suggest_near(word, names, cutoff=0.5)
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{hint}{' ' if hint else ''}known: {shown or 'none'}"


def suggest_near(
    word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6, show: Callable[[str], str] = str
) -> str:
    """Return a question that names the nearest matches, or "" if there are none. show: how to write a name."""
    near = difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(show, near))}?" if near else ""


def list_some(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Return the first items and the number of the others: `a, b, c and 4 more`."""
    more = len(items) - most
    return separator.join(items[:most]) + (f" and {more:,} more" if more > 0 else "")


def describe_unreadable(what: str, path: Path, error: OSError) -> str:
    """Return the message for a file that cannot be opened. what: the file, such as its recipe key."""
    if path.is_dir():
        return f"{what} {path} cannot be read: it is a folder; name a file"
    if isinstance(error, FileNotFoundError):
        return f"{what} {path} cannot be read: there is no such file (searched from {Path.cwd()}); correct the path"
    return f"{what} {path} cannot be read: {error.strerror}"
