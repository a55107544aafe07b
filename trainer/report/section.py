"""A section of the page: its record, and the tables that sections show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainer.report.run import ReportRun
from trainer.report.text import share, short_names, shorten

LISTED = 50  # maximum rows of tables that could be very long
NAME = 34  # maximum characters of a class name

Report = dict[str, Any]
"""The content of report.json."""


@dataclass(frozen=True)
class Section:
    """One section of the page. A package offers its own under the entry point group `incv.report_sections`."""

    name: str
    """Its id on the page."""
    title: str
    collect: Callable[[ReportRun], Mapping[str, Any]]
    """Returns the keys that it adds to report.json; their values are None where the run does not know them."""
    render: Callable[[Report, ReportRun], Mapping[str, Any] | Markup | None]
    """Returns the variables of the template or, without one, HTML; None: the section is left out."""
    template: Path | None = None
    """A Jinja template. It also has `report`, `names` (short names of the classes) and `m` (macros.html)."""
    link: str | None = ""
    """Its title in the navigation, if that is another; None: it is not there."""
    leads: bool = False
    """Whether it comes first: it shows images to look at, or what to do next."""


@dataclass(frozen=True)
class Column:
    """A column: its label, an explanation, and whether it holds words instead of numbers."""

    label: str
    about: str = ""
    words: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell: its text, what it is sorted by if not by its text, the whole text, and a second line."""

    text: str
    value: float | None = None
    whole: str = ""
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page. search: what the box for searching asks for; empty: no box. shown: rows before opening."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False
    search: str = ""
    shown: int = 0
    strong: frozenset[int] = field(default_factory=frozenset)
    """Rows to emphasise."""
    compact: bool = False
    """Whether it is narrow enough to stay a table on a phone."""


class ClassNames:
    """The cells of classes: short names, with the whole names behind them."""

    def __init__(self, report: Report) -> None:
        self._whole = report["class_names"]
        self._short = short_names(self._whole)

    def cell(self, number: int | None, note: str = "") -> Cell:
        if number is None:
            return Cell("–")
        return Cell(shorten(self._short[number], NAME), None, self._whole[number], note)


def count(number: int | None) -> Cell:
    return Cell("–" if number is None else f"{number:,}", number)


def percentage(value: float | None) -> Cell:
    return Cell(share(value), value)
