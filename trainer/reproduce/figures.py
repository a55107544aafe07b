"""The paper's figures from recorded runs, as standalone SVG; pure functions."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from trainer.report.plots import Series, heatmap, line_chart, percent
from trainer.reproduce.experiments import Experiment, PlannedRun
from trainer.reproduce.records import RunRecord
from trainer.theory import asymmetric_transition, symmetric_transition

Runs = Mapping[PlannedRun, RunRecord]
Panel = tuple[str, str]
"""A heading, and an SVG chart below it."""

_CSS = Path(__file__).parents[1] / "report" / "page.css"
_GAP, _HEADING = 24, 26


def draw_transitions(_experiment: Experiment, _runs: Runs) -> str | None:
    """Figure 1: T of symmetric and asymmetric noise, with the paper's 5 classes and ratio 0.4."""
    kinds = {"symmetric": symmetric_transition(0.4, 5), "asymmetric": asymmetric_transition(0.4, 5)}
    panels = [
        (
            f"{kind} noise, ratio 0.4",
            heatmap(
                matrix.tolist(),
                title=f"T of {kind} noise",
                names=[str(number + 1) for number in range(5)],
                row_label="true class",
                column_label="given label",
                width=320,
            ),
        )
        for kind, matrix in kinds.items()
    ]
    return arrange("Figure 1: the noise transition matrix T", panels)


def draw_curves(experiment: Experiment, runs: Runs) -> str | None:
    """Figure 6: test accuracy over epochs, mean over seeds; one panel for each setting. None without a run."""
    panels = []
    for setting in experiment.settings:
        series = []
        for colour, row in enumerate(experiment.rows):
            curves = [
                record.test_curve()
                for run, record in runs.items()
                if (run.row, run.setting) == (row.name, setting.name)
            ]
            if curves:
                points = [(epoch + 1, value) for epoch, value in enumerate(mean_curve(curves))]
                series.append(Series(f"{row.title} ({len(curves)})", points, colour))
        if series:
            chart = line_chart(series, title=setting.title, x_label="epoch", size=(520, 320))
            alone = f" of {series[0].label}" if len(series) == 1 else ""  # a single line has no legend
            panels.append((f"{setting.title}: test accuracy{alone} (%)", chart))
    return arrange(experiment.title, panels) if panels else None


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of several curves at each epoch that all of them have."""
    return [mean(values) for values in zip(*curves, strict=False)]


def draw_rounds(experiment: Experiment, runs: Runs) -> str | None:
    """Figure 4: label precision and recall after each round, mean over seeds, with the theory's values dashed."""
    panels = []
    for key, title in (("label_precision", "label precision (LP)"), ("label_recall", "label recall (LR)")):
        series = []
        for colour, setting in enumerate(experiment.settings):
            records = [record for run, record in runs.items() if run.setting == setting.name]
            if records:
                measured = mean_over_rounds(records, lambda entry: entry[key])  # noqa: B023 - called at once
                theory = mean_over_rounds(records, lambda entry: entry["theory"][key])  # noqa: B023
                series.append(Series(f"{setting.title} ({len(records)})", measured, colour))
                series.append(Series("theory", theory, colour, dashed=True))
        if series:
            rounds = sorted({x for line in series for x, _ in line.points})
            chart = line_chart(
                series, title=title, x_label="round", size=(520, 360), x_ticks=rounds, y_range=(0, 1), ticks=percent
            )
            panels.append((title, chart))
    return arrange(experiment.title, panels) if panels else None


def mean_over_rounds(
    records: Sequence[RunRecord], read: Callable[[Mapping], float | None]
) -> list[tuple[float, float | None]]:
    """Return (round, mean over the runs) for each round that all runs have."""
    rounds = min(len(record.rounds) for record in records)
    points: list[tuple[float, float | None]] = []
    for index in range(rounds):
        values = [read(record.rounds[index]) for record in records]
        known = [value for value in values if value is not None]
        points.append((index + 1, mean(known) if known else None))
    return points


def arrange(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Place charts in rows, each below its heading, in one SVG file with its own colours."""
    sizes = [
        tuple(int(side) for side in re.findall(r'(?:width|height)="(\d+)"', chart[:400])[:2]) for _, chart in panels
    ]
    width = max(size[0] for size in sizes)
    rows = [range(start, min(start + columns, len(panels))) for start in range(0, len(panels), columns)]
    parts, top = [], _GAP
    for row in rows:
        for place, index in enumerate(row):
            left = _GAP + place * (width + _GAP)
            heading, chart = panels[index]
            parts.append(f'<text class="strong" x="{left}" y="{top + 14}">{heading}</text>')
            parts.append(str(chart).replace("<svg ", f'<svg x="{left}" y="{top + _HEADING}" ', 1))
        top += _HEADING + max(sizes[index][1] for index in row) + _GAP
    across = _GAP + min(columns, len(panels)) * (width + _GAP)
    size = f'viewBox="0 0 {across} {top}" width="{across}" height="{top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}" {size}>\n'
        f"<style>{_read_style()}</style>\n"
        f'<rect width="{across}" height="{top}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _read_style() -> str:
    """Return the page's light colours and its rules for charts."""
    css = _CSS.read_text()
    root = re.search(r":root \{.*?\}", css, re.DOTALL)
    assert root is not None
    colours = re.sub(r"\s*color-scheme:[^;]*;", "", root[0])
    rules = [line for line in css.splitlines() if line.startswith("svg")]
    return "\n" + "\n".join([colours, *rules]).replace("display: block; max-width: 100%; height: auto; ", "") + "\n"


DRAWINGS: dict[str, Callable[[Experiment, Runs], str | None]] = {
    "figure1": draw_transitions,
    "figure4": draw_rounds,
    "figure6": draw_curves,
}
"""By the name of the experiment; each returns None if no run that it needs is recorded."""
