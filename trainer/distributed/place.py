"""Names of the places where a rank can be, as heartbeats and stopped.json have them, in words."""

import re

_FOLD = re.compile(r"\bincv/(\d+)/(\d+)( \w+)?")


def show_place(where: str) -> str:
    """Return the place in words, counted from 1: `incv/0/1 predict` becomes `incv, round 1, fold 2, predict`."""
    return _FOLD.sub(_show_fold, where)


def _show_fold(found: re.Match[str]) -> str:
    number, fold, doing = found.groups()
    return f"incv, round {int(number) + 1}, fold {int(fold) + 1}" + (f",{doing}" if doing else "")
