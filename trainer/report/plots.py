"""Small charts as inline SVG: pure functions from numbers to markup, with colours from the page's CSS variables."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from trainer.report.text import shorten

NARROW = 320  # width of charts on phones
NUMBERED_CELL = 22  # side of a heatmap's cell from which on it shows a number
LEGEND_ROW = 21  # height of a legend with one row
CHARACTER = 7.0  # mean character width at 12 px, for label layout
Ticks = Callable[[float], str]
Scale = Callable[[float], float]
_MAX_DOTS = 12  # a line of more points has no dots
_Sample = Callable[[float, float], str]
"""Draws the sample of a legend entry from (x, y) on, the left end of its middle; up to 17 pixels wide."""


@dataclass(frozen=True)
class Series:
    """One line of a line chart, with dots at its points if they are few; a y value of None breaks the line."""

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dashed: bool = False
    about: str = ""
    """What a pointer on the line shows; by default, the label. Lines of one label and colour share a legend entry."""
    joined: bool = True
    """Whether a line joins the points; False: dots alone."""


@dataclass(frozen=True)
class Bar:
    """One horizontal bar: its value, the text after it, and dots drawn on it (such as individual networks)."""

    label: str
    value: float
    text: str
    colour: int = 0
    dots: Sequence[float] = ()


def plain(value: float) -> str:
    """Format a tick label: 0.25, 40, 1,200, 3M."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def percent(value: float) -> str:
    return f"{value * 100:g} %" if abs(value * 100) >= 1e-9 else "0 %"


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers (1, 2, 2.5 or 5 times a power of ten) that cover [low, high] in about `about` steps."""
    span = high - low
    if not math.isfinite(span) or span < 1e-300:  # zero, or too small for a logarithm
        low, span = (low if math.isfinite(low) else 0.0), max(abs(low), 1.0) if math.isfinite(low) else 1.0
        high = low + span
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= about + 1e-9)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def for_widths(draw: Callable[..., Markup], *data: Any, wide: int = 480, **options: Any) -> Markup:
    """Draw a chart of this data twice, for wide screens and for phones; the page's CSS shows one of them."""
    charts = (draw(*data, width=width, **options) for width in (wide, NARROW))
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(*charts)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    width: int = 480,
    height: int = 280,
    x_ticks: Sequence[float] | None = None,
    y_range: tuple[float, float] | None = None,
    ticks: Ticks = plain,
    grows: bool = False,
) -> Markup:
    """Draw lines on shared axes, with a legend above if there are several.

    grows: whether the second and further rows of the legend add to the height, instead of taking from the chart.
    """
    known = [(x, y) for line in series for x, y in line.points if y is not None]
    xs, ys = [x for x, _ in known] or [0.0, 1.0], [y for _, y in known] or [0.0, 1.0]
    along = list(x_ticks or nice_ticks(min(xs), max(xs), 5 if width > 300 else 3))
    up = nice_ticks(*(y_range or (min(ys), max(ys))), about=5 if height > 200 else 3)
    entries = {(s.label, s.colour): (s.label, _sample(s)) for s in reversed(series)}
    legend, used = _legend(list(reversed(entries.values())), width) if len(series) > 1 else ([], 0)
    height += max(used - LEGEND_ROW, 0) if grows else 0
    left = 14 + CHARACTER * max(len(ticks(value)) for value in up)
    box = (left, used + 10.0, width - 14.0, height - (40.0 if x_label else 24.0))
    low, high = min(along[0], min(xs)), max(along[-1] if x_ticks else max(xs), max(xs))
    to_x, to_y = _scale(low, high, box[0] + 6, box[2]), _scale(up[0], up[-1], box[3], box[1])
    parts = legend
    for value in up:
        parts.append(_line(box[0], to_y(value), box[2], to_y(value), "grid"))
        parts.append(_text(box[0] - 6, to_y(value) + 4, ticks(value), "end"))
    parts += [_text(to_x(value), box[3] + 17, plain(value)) for value in along if low <= value <= high]
    if x_label:
        parts.append(_text((box[0] + box[2]) / 2, height - 5, x_label))
    for line in series:
        parts += _draw_series(line, to_x, to_y)
    return _svg(title, width, height, parts)


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    high: float | None = None,
    reference: float | None = None,
    width: int = 480,
    ticks: Ticks | None = plain,
) -> Markup:
    """Draw horizontal bars from zero, each followed by its text. reference: value marked by a dashed line."""
    row, top = 34, 8
    longest = 26 if width > NARROW else 18
    left = 12 + CHARACTER * max((len(shorten(bar.label, longest)) for bar in bars), default=0)
    right = width - 14 - CHARACTER * max((len(bar.text) for bar in bars), default=0)
    values = [bar.value for bar in bars] + [reference or 0.0]
    marks = nice_ticks(0, high or max(values), 4 if width > NARROW else 2)
    to_x = _scale(0, high or marks[-1], left, right)
    bottom = top + row * len(bars)
    parts = []
    for mark in marks if ticks else ():
        if mark <= (high or marks[-1]):
            parts.append(_line(to_x(mark), top, to_x(mark), bottom, "grid"))
            parts.append(_text(to_x(mark), bottom + 16, ticks(mark) if ticks else ""))
    texts = []
    for index, bar in enumerate(bars):
        y = top + row * index
        end = to_x(max(bar.value, 0.0))
        about = f"{bar.label}: {bar.text}"
        parts.append(_rect(left, y + 6, max(end - left, 1.0), row - 12, f"var(--c{bar.colour})", about))
        parts += [f'<circle class="dot" cx="{to_x(dot):.1f}" cy="{y + row / 2:.1f}" r="3"/>' for dot in bar.dots]
        texts.append(_text(left - 8, y + row / 2 + 4, shorten(bar.label, longest), "end", "strong"))
        after = max([end, *map(to_x, bar.dots)]) + 7
        if reference is not None and after - 4 < to_x(reference) < after + CHARACTER * len(bar.text):
            after = to_x(reference) + 7  # beside the reference line, not across it
        texts.append(_text(after, y + row / 2 + 4, bar.text, "start", "value"))
    if reference is not None:
        parts.append(_line(to_x(reference), top - 4, to_x(reference), bottom, "reference"))
    parts += texts
    return _svg(title, width, bottom + (24 if ticks else 4), parts)


def stacked_bars(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts_of: Sequence[tuple[str, str]],
    *,
    title: str,
    width: int = 480,
    ticks: Ticks = "{:,}".format,
) -> Markup:
    """Draw one stacked bar per row, of counts or shares. parts_of: (label, CSS colour) of each part."""
    legend, top = _legend([(label, _square(colour)) for label, colour in parts_of], width)
    row = min(max(225 // max(len(rows), 1), 34), 72)
    left = 12 + CHARACTER * max((len(label) for label, _ in rows), default=0)
    whole = max((sum(counts) for _, counts in rows), default=0) or 1
    to_x = _scale(0, whole, left, width - 8)
    parts, y = legend, top + 8.0
    for label, counts in rows:
        parts.append(_text(left - 8, y + row / 2 + 4, label, "end", "strong"))
        start = 0.0
        for (name, colour), count in zip(parts_of, counts, strict=True):
            x, wide = to_x(start), to_x(start + count) - to_x(start)
            if count:
                parts.append(
                    _rect(x, y + 5, max(wide - 1, 0.5), row - 10, colour, f"{label}, {name}: {ticks(count)}")
                )
            if wide > CHARACTER * len(ticks(count)) + 8:
                parts.append(_text(x + wide / 2, y + row / 2 + 4, ticks(count), "middle", "inside"))
            start += count
        y += row
    return _svg(title, width, round(y + 6), parts)


def heat(value: float) -> float:
    """Return the opacity of a share: its square root, which keeps small off-diagonal shares visible."""
    return math.sqrt(min(max(value, 0.0), 1.0))


def heatmap(
    matrix: Sequence[Sequence[float | None]],
    *,
    title: str,
    names: Sequence[str],
    row_label: str,
    column_label: str,
    width: int = 480,
    longest: int = 12,
) -> Markup:
    """Draw shares as opacity, on the same scale in every heatmap, with percentages in the cells if they fit.

    longest: maximum characters of a name.
    """
    count = len(matrix)
    shown = [shorten(name, longest) for name in names]
    left, room = _left_of_matrix(names, longest), CHARACTER * max(map(len, shown), default=0)
    cell = (width - left - 6) / max(count, 1)
    slanted = all(shown) and room > cell - 4
    bottom = 8 + cell * count
    below = (room * 0.72 + 16) if slanted else 18.0
    parts = []
    for i, line in enumerate(matrix):
        y = 8 + i * cell
        if shown[i]:
            parts.append(_text(left - 6, y + cell / 2 + 4, shown[i], "end"))
            parts.append(_column_name(left + (i + 0.5) * cell, bottom, shown[i], slanted))
        for j, value in enumerate(line):
            parts += _cell(
                left + j * cell,
                y,
                cell,
                value,
                f"{row_label} {names[i] or i}, {column_label} {names[j] or j}",
            )
    middle = 8 + cell * count / 2
    parts.append(f'<g transform="rotate(-90 12 {middle:.1f})">{_text(12, middle, row_label, style="strong")}</g>')
    parts.append(_text(left + cell * count / 2, bottom + below + 16, column_label, style="strong"))
    return _svg(title, width, round(bottom + below + 24), parts)


def readable_width(names: Sequence[str], longest: int) -> int:
    """Return the width of a heatmap in which the cells have room for their numbers."""
    return math.ceil(_left_of_matrix(names, longest) + (NUMBERED_CELL + 2) * len(names) + 6)


def _left_of_matrix(names: Sequence[str], longest: int) -> float:
    return 30 + CHARACTER * max((min(len(name), longest) for name in names), default=0)


def _column_name(x: float, bottom: float, name: str, slanted: bool) -> str:
    if not slanted:
        return _text(x, bottom + 15, name)
    return f'<g transform="rotate(-45 {x:.1f} {bottom + 12:.1f})">{_text(x + 3, bottom + 14, name, "end")}</g>'


def _cell(x: float, y: float, side: float, value: float | None, about: str) -> list[str]:
    if value is None:
        return [_rect(x, y, side - 1, side - 1, "var(--line)", f"{about}: no samples")]
    about = f"{about}: {value * 100:.1f} %"
    parts = [_rect(x, y, side - 1, side - 1, "var(--heat)", about, heat(value))]
    if side >= NUMBERED_CELL and value >= 0.005:
        style = "on-heat" if heat(value) > 0.6 else "small"
        parts.append(_text(x + (side - 1) / 2, y + side / 2 + 3.5, f"{value * 100:.0f}", style=style))
    return parts


def _draw_series(line: Series, to_x: Scale, to_y: Scale) -> list[str]:
    """Draw one series: a path, interrupted at missing values, and a dot at each point if there are few."""
    name = f"<title>{escape(line.about or line.label)}</title>"
    runs = [
        [(to_x(x), to_y(y)) for x, y in run if y is not None]
        for missing, run in itertools.groupby(line.points, lambda point: point[1] is None)
        if not missing
    ]
    dotted = not line.joined or len(line.points) <= _MAX_DOTS
    dots = [_dot(x, y, line.colour, "" if line.joined else name) for run in runs for x, y in run if dotted]
    if not line.joined:
        return dots
    path = " ".join("M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    return [f'<path class="curve" d="{path}" stroke="var(--c{line.colour})"{dash}>{name}</path>', *dots]


def _dot(x: float, y: float, colour: int, inside: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="var(--c{colour})">{inside}</circle>'


def _legend(entries: Sequence[tuple[str, _Sample]], width: int) -> tuple[list[str], int]:
    """Lay out legend entries from left to right, wrapped to the width; returns their markup and height."""
    parts, x, y = [], 4.0, 13
    for label, draw_sample in entries:
        wide = 30 + CHARACTER * len(label)
        if x + wide > width and x > 4:
            x, y = 4.0, y + 19
        parts += [draw_sample(x, y - 4), _text(x + 22, y, label, "start")]
        x += wide + 8
    return parts, y + 8


def _sample(line: Series) -> _Sample:
    if not line.joined:
        return lambda x, y: _dot(x + 8.5, y, line.colour)
    dash = ' stroke-dasharray="4 3"' if line.dashed else ""
    return lambda x, y: f'<path class="curve" d="M{x:.1f} {y} h17" stroke="var(--c{line.colour})"{dash}/>'


def _square(colour: str) -> _Sample:
    return lambda x, y: _rect(x + 4, y - 6, 12, 12, colour)


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / span


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, fill: str, about: str = "", opacity: float = 1.0) -> str:
    faint = f' fill-opacity="{opacity:.3f}"' if opacity < 1 else ""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{faint}'
    return f"<rect {shape}><title>{escape(about)}</title></rect>" if about else f"<rect {shape}/>"


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> Markup:
    name = escape(title)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return Markup(f'<svg role="img" aria-label="{name}" {size}><title>{name}</title>{"".join(parts)}</svg>')
