"""The paper's figures from recorded runs, as standalone SVG; pure functions."""

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import mean

from trainer.incv.measure import or_none
from trainer.report.plots import Series, heatmap, line_chart, nice_ticks, percent
from trainer.reproduce.experiments import Experiment
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import PlannedRun
from trainer.theory import (
    Array,
    accuracy,
    asymmetric_transition,
    label_precision,
    label_recall,
    symmetric_transition,
)

Runs = Mapping[PlannedRun, RunRecord]
Panel = tuple[str, str]
"""A heading, and an SVG chart below it."""

_CSS = Path(__file__).parents[1] / "report" / "template" / "page.css"
_GAP, _HEADING = 24, 26
_IMAGE = 128  # pixels of an image's side
_CLASSES = 10  # of CIFAR-10, all equally frequent
_UNIFORM = [1 / _CLASSES] * _CLASSES
_TRANSITIONS = {"symmetric": symmetric_transition, "asymmetric": asymmetric_transition}


FIGURE_START = b'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="'
"""How the file of each figure begins."""


def draw_transitions(_experiment: Experiment, _runs: Runs) -> str | None:
    """Figure 1: T of symmetric and asymmetric noise, with the paper's 5 classes and ratio 0.4."""
    kinds = {kind: transition(0.4, 5) for kind, transition in _TRANSITIONS.items()}
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
                record.curve_on("test")
                for run, record in runs.items()
                if (run.row, run.setting) == (row.name, setting.name)
            ]
            if curves:
                points = [(epoch + 1, value) for epoch, value in enumerate(mean_curve(curves))]
                series.append(Series(f"{row.title} ({len(curves)})", points, colour))
        if series:
            chart = line_chart(series, title=setting.title, x_label="epoch", width=520, height=320)
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
                series,
                title=title,
                x_label="round",
                width=520,
                height=360,
                x_ticks=rounds,
                y_range=(0, 1),
                ticks=percent,
            )
            panels.append((title, chart))
    return arrange(experiment.title, panels) if panels else None


def draw_theory(experiment: Experiment, runs: Runs) -> str | None:
    """Figure 2: agreement with the labels, LP and LR of one round by noise ratio, and the theory's curves."""
    measures: dict[str, tuple[str, Callable[[Array], float]]] = {
        "agreement": ("accuracy on the held-out half", lambda T: accuracy(T, _UNIFORM)),
        "label_precision": ("label precision (LP)", lambda T: label_precision(T, _UNIFORM)),
        "label_recall": ("label recall (LR)", lambda T: label_recall(T, _UNIFORM)),
    }
    panels = []
    for kind, transition in _TRANSITIONS.items():
        settings = {each.name: each for each in experiment.settings if each.kind == kind}
        known = [(settings[run.setting].ratio, record) for run, record in runs.items() if run.setting in settings]
        if not known:
            continue
        highest = 1.0 if kind == "symmetric" else 0.5
        ratios = [step / 50 for step in range(round(50 * highest) + 1)]
        for key, (title, formula) in measures.items():
            points = {ratio: [each.rounds[0][key] for own, each in known if own == ratio] for ratio, _ in known}
            measured = [(ratio, _mean_known(values)) for ratio, values in sorted(points.items())]
            theory = [(ratio, or_none(formula(transition(ratio, _CLASSES)))) for ratio in ratios]
            series = [Series("theory", theory, 1), Series("measured", measured, 0, joined=False)]
            ticks = nice_ticks(0, highest)
            chart = line_chart(
                series, title=title, x_label="noise ratio", width=340, height=280, x_ticks=ticks, y_range=(0, 1)
            )
            panels.append((f"{kind}: {title}", chart))
    return arrange(experiment.title, panels, columns=3) if panels else None


def draw_confusions(experiment: Experiment, runs: Runs) -> str | None:
    """Figures 3 and 7: M from the held-out predictions of one round beside T, for each setting with a run."""
    panels = []
    for setting in experiment.settings:
        record = next((record for run, record in runs.items() if run.setting == setting.name), None)
        if record is None or record.confusion is None:
            continue
        names = [str(number) for number in range(len(record.confusion["predicted"]))]
        for key, title, columns in (("predicted", "M", "prediction"), ("transition", "T", "given label")):
            chart = heatmap(
                record.confusion[key],
                title=f"{title}, {setting.title}",
                names=names,
                row_label="true class",
                column_label=columns,
                width=400,
            )
            panels.append((f"{title}, {setting.title}", chart))
    return arrange(experiment.title, panels) if panels else None


def draw_suspects(experiment: Experiment, runs: Runs) -> str | None:
    """Figure 5: images of the most suspicious labels, each with its given and its predicted class."""
    suspects = [each for record in runs.values() for each in record.suspects if each["image"]]
    panels = [
        (
            f"labelled {escape(each['given'])}",
            f'<svg width="{_IMAGE}" height="{_IMAGE + 20}">'
            f'<image href="{escape(each["image"])}" width="{_IMAGE}" height="{_IMAGE}" '
            f'style="image-rendering: pixelated"/><text x="0" y="{_IMAGE + 16}">predicted {escape(each["predicted"])}'
            "</text></svg>",
        )
        for each in suspects
    ]
    return arrange(experiment.title, panels, columns=4) if panels else None


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def mean_over_rounds(
    records: Sequence[RunRecord], read: Callable[[Mapping], float | None]
) -> list[tuple[float, float | None]]:
    """Return (round, mean over the runs) for each round that all runs have."""
    rounds = min(len(record.rounds) for record in records)
    points: list[tuple[float, float | None]] = []
    for index in range(rounds):
        points.append((index + 1, _mean_known([read(record.rounds[index]) for record in records])))
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
        f'{FIGURE_START.decode()}{title}" {size}>\n'
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
    "figure2": draw_theory,
    "figure3": draw_confusions,
    "figure4": draw_rounds,
    "figure5": draw_suspects,
    "figure6": draw_curves,
    "figure7": draw_confusions,
}
"""By the name of the experiment; each returns None if no run that it needs is recorded."""
