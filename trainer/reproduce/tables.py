"""Tables of accuracies from recorded runs: numbers, plain text and Markdown; pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from trainer.report.text import align_table
from trainer.reproduce.experiments import TEST, Experiment, Measure, Row
from trainer.reproduce.paper import Reported
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import PlannedRun, iterate_cells

LAST_EPOCHS = 10
_MEASURES: dict[Measure, str] = {
    "last": "{epoch}",
    "last_10": f"mean of the last {LAST_EPOCHS} epochs",
    "ensemble": "ensemble of both networks, {epoch}",
}
"""What a table calls each measure; {epoch} is the experiment's."""


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation over seeds, in percent."""

    mean: float
    std: float | None
    """Of a sample (n - 1); None for one seed."""
    seeds: int

    def __str__(self) -> str:
        spread = "" if self.std is None else f" ± {self.std:.2f}"
        return f"{self.mean:.2f}{spread} ({self.seeds})"

    def as_json(self) -> dict[str, Any]:
        std = None if self.std is None else round(self.std, 4)
        return {"mean": round(self.mean, 4), "std": std, "seeds": self.seeds}


@dataclass(frozen=True)
class Cell:
    """The recorded results of one method in one setting."""

    measures: Mapping[Measure, Summary] = field(default_factory=dict)
    """By the names of `_MEASURES`; a measure that no run records is left out."""
    files: tuple[str, ...] = ()


Table = dict[tuple[str, str], Cell]
"""Cells by (row, setting)."""


def summarise(values: Sequence[float]) -> Summary | None:
    if not values:
        return None
    return Summary(mean(values), stdev(values) if len(values) > 1 else None, len(values))


def measure_run(record: RunRecord, evaluation_set: str = TEST) -> dict[Measure, float]:
    """Return what a run contributes to each measure."""
    measured: dict[Measure, float] = {}
    accuracy, curve = record.accuracy_on(evaluation_set), record.curve_on(evaluation_set)
    if accuracy is not None:
        measured["last"] = accuracy.top1
        if accuracy.top1_ensemble is not None:
            measured["ensemble"] = accuracy.top1_ensemble
    if len(curve) >= LAST_EPOCHS:
        measured["last_10"] = mean(curve[-LAST_EPOCHS:])
    return measured


def build_table(
    experiment: Experiment, recorded: Mapping[PlannedRun, str], records: Mapping[str, RunRecord]
) -> Table:
    """Summarise the recorded runs of each cell over their seeds."""
    table: Table = {}
    for row, setting in iterate_cells(experiment):
        runs = sorted(
            (run for run in recorded if (run.row, run.setting) == (row.name, setting.name)), key=lambda run: run.seed
        )
        measured = [measure_run(records[recorded[run]], experiment.evaluation_set) for run in runs]
        summaries = {name: summarise([one[name] for one in measured if name in one]) for name in _MEASURES}
        known = {name: summary for name, summary in summaries.items() if summary is not None}
        table[row.name, setting.name] = Cell(known, tuple(recorded[run] for run in runs))
    return table


def table_json(
    experiment: Experiment, table: Table, reported: Mapping[str, Mapping[str, Reported]]
) -> dict[str, Any]:
    """Return {method: {setting: {mean, std, seeds, measure, ...}}}, in percent.

    mean, std and seeds are those of the method's headline, which `measure` names; the other measures stand beside it.
    """
    content: dict[str, Any] = {row.name: {} for row in experiment.rows}
    for row, setting in iterate_cells(experiment):
        cell = table[row.name, setting.name]
        if row.headline not in cell.measures:
            continue
        entry = cell.measures[row.headline].as_json() | {"measure": row.headline}
        entry |= {name: cell.measures[name].as_json() for name in _order(row)[1:] if name in cell.measures}
        if paper := reported.get(row.name, {}).get(setting.column or setting.name):
            entry["paper"] = {"mean": paper.mean, "std": paper.deviation}
        content[row.name][setting.name] = entry | {"runs": list(cell.files)}
    return content


def table_lines(
    experiment: Experiment, table: Table, reported: Mapping[str, Mapping[str, Reported]]
) -> list[list[str]]:
    """Return the cells of the table, the head first: for each method its measures, then the paper's values."""
    lines = [["", "", *(setting.title for setting in experiment.settings)]]
    for row in experiment.rows:
        for name in _shown(experiment, table, row):
            title = row.title if name == row.headline else ""
            lines.append([title, _describe(experiment, row, name), *_measured(experiment, table, row, name)])
        if row.name in reported:
            lines.append(["", "paper", *_reported(experiment, row, reported)])
    return lines


UNITS = "%, mean ± standard deviation, number of seeds; without `ensemble`, the mean of both networks"


def format_text(experiment: Experiment, table: Table, reported: Mapping[str, Mapping[str, Reported]]) -> str:
    """Return the table as plain text."""
    return f"{experiment.title} ({UNITS})\n\n{align_table(table_lines(experiment, table, reported), left=2)}"


def format_markdown(experiment: Experiment, table: Table, reported: Mapping[str, Mapping[str, Reported]]) -> str:
    """Return the table as Markdown."""
    head, *lines = table_lines(experiment, table, reported)
    shown = [f"| | | {' | '.join(head[2:])} |", f"|---|---|{'---|' * len(experiment.settings)}"]
    for title, measure, *cells in lines:
        is_paper = not title and measure == "paper"
        first = "" if is_paper else f" **{title}**" if title else " "
        shown.append(f"|{first} | {measure} | {' | '.join(cells)} |")
    return "\n".join(shown)


def _order(row: Row) -> list[Measure]:
    """Return all measures, the row's headline first."""
    return [row.headline, *(name for name in _MEASURES if name != row.headline)]


def _shown(experiment: Experiment, table: Table, row: Row) -> list[Measure]:
    """Return the headline, and all other measures that are recorded."""
    first, *others = _order(row)
    return [first, *(name for name in others if _has(experiment, table, row, name))]


def _describe(experiment: Experiment, row: Row, measure: Measure) -> str:
    """Name a measure; below an ensemble, the last epoch must say that it is not of the ensemble."""
    name = _MEASURES[measure].format(epoch=experiment.epoch)
    return f"mean of both networks, {name}" if measure == "last" and row.headline == "ensemble" else name


def _has(experiment: Experiment, table: Table, row: Row, measure: Measure) -> bool:
    return any(measure in table[row.name, setting.name].measures for setting in experiment.settings)


def _measured(experiment: Experiment, table: Table, row: Row, measure: Measure) -> list[str]:
    cells = [table[row.name, setting.name].measures.get(measure) for setting in experiment.settings]
    return ["–" if cell is None else str(cell) for cell in cells]


def _reported(experiment: Experiment, row: Row, reported: Mapping[str, Mapping[str, Reported]]) -> list[str]:
    cells = [reported[row.name].get(setting.column or setting.name) for setting in experiment.settings]
    return ["–" if cell is None else f"{cell.mean:.2f} ± {cell.deviation:.2f} (5)" for cell in cells]
