"""The comparison as text for the terminal; pure functions."""

import textwrap
from collections.abc import Sequence

from trainer.compare.comparison import Comparison, Lines, sample_curves
from trainer.compare.grouping import Difference, Group
from trainer.doctor.verdict import format_spans
from trainer.report.text import align_table, choose_form, printable, shorten
from trainer.reproduce.tables import UNITS

WIDTH = 118
_VALUE = 70  # characters of a value, such as a list of milestones


def format_comparison(comparison: Comparison) -> str:
    """Return the comparison as text, results first; control characters in names and values are escaped."""
    groups = comparison.groups
    parts = [_format_groups(groups)]
    for table in comparison.accuracy:
        parts.append(_section(f"{table.experiment.title} ({UNITS})", _align(table.lines, left=2)))
    if comparison.selection:
        title = "INCV after its last round, by group (LP: label precision, LR: label recall)"
        parts.append(_section(title, _align(comparison.selection)))
    for curves in comparison.curves:
        parts.append(_section(f"{curves.title}, by {curves.x_label}", _align(sample_curves(curves))))
    parts.append(_section("mean time of a run, by group", _align(comparison.cost)))
    if comparison.recipe:
        parts.append(_format_differences("what differs in the recipe", comparison.recipe))
    elif len(groups) > 1:
        parts.append("no recipe key differs")
    if comparison.environment:
        parts.append(_format_differences("what else differs", comparison.environment))
    parts.append("\n".join(textwrap.fill(printable(f"note: {note}"), WIDTH) for note in comparison.notes))
    return "\n\n".join(part for part in parts if part)


def _format_differences(title: str, differences: Sequence[Difference]) -> str:
    return _section(f"{title} (value: groups)", _align(list_differences(differences), left=2))


def _format_groups(groups: Sequence[Group]) -> str:
    return _section(
        f"{count_words(groups)}; runs of a group differ in the seed alone", _align(list_groups(groups), 5)
    )


def count_words(groups: Sequence[Group]) -> str:
    """Say how many runs and groups there are. A run with several methods is in several groups."""
    runs = len({run.name for group in groups for run in group.runs})
    return f"{runs} {choose_form(runs, 'run', 'runs')} in {len(groups)} {choose_form(len(groups), 'group', 'groups')}"


def list_groups(groups: Sequence[Group]) -> Lines:
    """Return a line for each group: its number, recipe, method, what tells it from similar groups, and its seeds."""
    lines = [["", "recipe", "method", "variant", "seeds"]]
    for group in groups:
        seeds = format_spans(run.record.seed for run in group.runs)
        lines.append([str(group.number), group.recipe, group.method, shorten(group.variant, _VALUE), seeds])
    has_variant = any(group.variant for group in groups)
    return lines if has_variant else [[*line[:3], line[4]] for line in lines]


def list_differences(differences: Sequence[Difference]) -> Lines:
    """Return a line for each key: its name, and every value with the numbers of the groups that have it."""
    return [
        [each.key, "; ".join(f"{shorten(value, _VALUE)}: {format_spans(numbers)}" for value, numbers in each.values)]
        for each in differences
    ]


def _align(lines: Lines, left: int = 1) -> str:
    return align_table([[printable(cell) for cell in line] for line in lines], left)


def _section(title: str, body: str) -> str:
    return f"{printable(title)}\n{textwrap.indent(body, '  ')}"
