"""Formats numbers, durations, names of classes and other texts, for the report and the command line."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

_SYNSET = re.compile(r"(?P<wnid>n\d{8}) +(?P<words>\S.*)")
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")


def show_controls(value: Any) -> Any:
    """Make the control characters of a text visible, except line breaks and tabs: they could hide or reorder text.

    Other values and markup are returned as they are.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def choose_form(number: int, one: str, several: str) -> str:
    """Return the words for this number of things."""
    return one if number == 1 else several


def format_duration(seconds: float | None) -> str:
    """Format seconds as 0.4 s, 12 s, 3 min 05 s or 2 h 07 min; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def shorten(text: str, most: int, keep_end: bool = False) -> str:
    """Shorten a text to `most` characters. keep_end: omit the middle instead of the end."""
    if len(text) <= most:
        return text
    if not keep_end:
        return text[: most - 1] + "…"
    head = (most - 1) // 2
    return f"{text[:head]}…{text[head + 1 - most :]}"


def printable(text: str) -> str:
    """Escape the characters that could control a terminal or reorder its text: a name may come from anywhere."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def share(value: float | None, digits: int = 1) -> str:
    """Format a fraction as a percentage: 0.405 -> 40.5 %; a dash for None."""
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def align_table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align columns for the terminal. left: number of columns of words, which are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if place < left else ">" for place in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in lines
    )


def points(value: float | None) -> str:
    """Format a percentage: 93.04 -> 93.0 %; a dash for None."""
    return "–" if value is None else f"{value:.1f} %"


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten `n01440764 tench, Tinca tinca` to `tench`; other names are unchanged.

    A name shared by several classes (crane, maillot) keeps its WordNet id: `crane (n02012849)`.
    """
    synsets = [_SYNSET.fullmatch(name) for name in names]
    first = [synset["words"].split(",")[0].strip() if synset else None for synset in synsets]
    shared = Counter(first)
    return [
        name if synset is None else f"{word} ({synset['wnid']})" if shared[word] > 1 else str(word)
        for name, synset, word in zip(names, synsets, first, strict=True)
    ]
