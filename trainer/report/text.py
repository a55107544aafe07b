"""Formats durations, shortens long texts and shows control characters, for the report and the command line."""

import re
from typing import Any

from markupsafe import Markup

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
