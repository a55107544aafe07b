"""The comparison as one self-contained HTML page, in the style of the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.compare.comparison import Comparison, Curves
from trainer.compare.text import count_words, list_differences, list_groups
from trainer.report.page import TEMPLATES, make_environment
from trainer.report.plots import Series, for_widths, line_chart
from trainer.report.text import show_controls
from trainer.reproduce.tables import UNITS

_COLOURS = 8
_MOST_LINES = 6  # of one chart; more groups have a chart for each recipe


def render_page(comparison: Comparison) -> str:
    """Render the page; the template and the charts escape all text that comes from runs."""
    environment = make_environment(Path(__file__).parent, TEMPLATES)  # the latter for page.css and tables.css
    return environment.get_template("comparison.html").render(
        comparison=comparison,
        groups=list_groups(comparison.groups),
        recipe=list_differences(comparison.recipe),
        environment=list_differences(comparison.environment),
        count_words=count_words(comparison.groups),
        units=UNITS.replace("`", ""),
        charts=[panel for curves in comparison.curves for panel in _draw(curves)],
        paths=[(group.number, [run.name for run in group.runs]) for group in comparison.groups],
    )


def _draw(curves: Curves) -> list[dict[str, Any]]:
    """Draw the lines over each other: in one chart or, if there are many, in one for each recipe."""
    if len(curves.lines) <= _MOST_LINES:
        return [_draw_chart(curves, curves.title, range(len(curves.lines)))]
    recipes = dict.fromkeys(group.family for group, _ in curves.lines)
    return [
        _draw_chart(
            curves,
            f"{recipe}: {curves.title}",
            [place for place, (group, _) in enumerate(curves.lines) if group.family == recipe],
        )
        for recipe in recipes
    ]


def _draw_chart(curves: Curves, title: str, places: Sequence[int]) -> dict[str, Any]:
    series = []
    for order, place in enumerate(places):
        group, points = curves.lines[place]
        label = show_controls(f"{group.number} {group.title} ({len(group.runs)})")
        series.append(Series(label, points, order % _COLOURS, dashed=order >= _COLOURS))
    rounds = sorted({x for line in series for x, _ in line.points}) if curves.x_label == "round" else None
    alone = f", {series[0].label}" if len(series) == 1 else ""  # a single line has no legend
    chart = for_widths(
        line_chart, series, title=show_controls(title), x_label=curves.x_label, x_ticks=rounds, height=280
    )
    return {"title": f"{title}{alone}", "plot": chart}
