"""One finding of the doctor about a machine, and the report of all of them; pure functions."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.report.text import choose_form, printable

Level = Literal["ok", "note", "problem"]
_WIDTH = 100
_LEVEL_WIDTH = len("problem")


@dataclass(frozen=True)
class Finding:
    """What was examined and found. A note limits what can be run here; a problem would end or harm a run."""

    subject: str
    level: Level
    words: str
    fix: str = ""
    """What to do about a note or a problem."""
    place: str = ""
    """The rank and its host, if it is not the one that prints."""


def format_findings(findings: Sequence[Finding]) -> str:
    """Format a line for each finding, with its fix below, and the verdict."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        head = f"{finding.level:<{_LEVEL_WIDTH}}  {finding.subject:<{width}}  "
        words = f"{finding.place}: {finding.words}" if finding.place else finding.words
        lines.append(_wrap(printable(words), head))
        if finding.fix:
            lines.append(_wrap(printable(f"fix: {finding.fix}"), " " * len(head)))
    return "\n".join([*lines, "", judge_machine(findings)])


def judge_machine(findings: Sequence[Finding]) -> str:
    """Return the verdict in one sentence."""
    problems = list(dict.fromkeys(finding.subject for finding in findings if finding.level == "problem"))
    notes = sum(finding.level == "note" for finding in findings)
    if problems:
        count = f"{len(problems)} {choose_form(len(problems), 'problem', 'problems')}"
        return f"verdict: {count} to solve before a run: {', '.join(problems)}."
    if notes:
        return (
            f"verdict: runs will work here, within the limits of the {choose_form(notes, 'note', f'{notes} notes')}."
        )
    return "verdict: all is well."


def _wrap(words: str, head: str) -> str:
    return textwrap.fill(
        words,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
