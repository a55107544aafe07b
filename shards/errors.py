"""Errors that the user can correct: the problem, its setting and the fix, in the names of a front end."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class CommandStopped(Exception):
    """A command was stopped on request. The message says what is kept and how to continue."""


@dataclass(frozen=True)
class Fix:
    """What to do about an error with a setting. `{}` in the text stands for the setting's name."""

    text: str
    field: str


class InputError(Exception):
    """Invalid input. The message says what is wrong, why, and what to do next.

    Args:
        problem: what is wrong and why.
        field: the setting that the problem is about: a recipe key (`model.weights`), or the name of an option
            (`max_rejected`, which the message calls `--max-rejected` unless a front end has another name for it).
        fix: what to do next, or the alternatives. A Fix with a setting that the front end lacks is not shown.
    """

    exit_code = 1

    def __init__(self, problem: str, *, field: str | None = None, fix: str | Fix | Sequence[str | Fix] = ()) -> None:
        super().__init__(problem)
        self.problem, self.field = problem, field
        self.fixes: tuple[str | Fix, ...] = (fix,) if isinstance(fix, str | Fix) else tuple(fix)
        self._names: dict[str, str | None] = {}

    def rename_fields(self, names: Mapping[str, str | None]) -> None:
        """Call settings as a front end does. names: by field, or by the name that an inner front end gave; None: it
        has no such setting.
        """
        fields = {fix.field for fix in self.fixes if isinstance(fix, Fix)} | ({self.field} if self.field else set())
        for field in fields:
            name = self._names.get(field, field)
            if name is not None and name in names:
                self._names[field] = names[name]

    def __str__(self) -> str:
        where = self._name(self.field) if self.field else None
        fixes = ", or ".join(filter(None, map(self._describe_fix, self.fixes)))
        return (f"{where}: " if where else "") + self.problem + (f"; {fixes}" if fixes else "")

    def _name(self, field: str) -> str | None:
        return self._names.get(field, field if "." in field else f"--{field.replace('_', '-')}")

    def _describe_fix(self, fix: str | Fix) -> str:
        if isinstance(fix, str):
            return fix
        name = self._name(fix.field)
        return fix.text.replace("{}", name) if name else ""


class ConfigError(InputError):
    """An invalid recipe, override or command line."""

    exit_code = 2


class DataError(InputError):
    """Unusable images, shards, labels or checkpoints, or an unusable disk."""

    exit_code = 3


@contextmanager
def renamed_fields(names: Mapping[str, str | None]) -> Iterator[None]:
    """Call the settings in errors of the block by these names; see InputError.rename_fields."""
    try:
        yield
    except InputError as error:
        error.rename_fields(names)
        raise


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
