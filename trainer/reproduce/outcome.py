"""What is recorded of an experiment and what is missing, as numbers, text and files."""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.durable import require_replaceable, write_bytes, write_json
from shards.errors import DataError
from trainer.reproduce import paper
from trainer.reproduce.experiments import EXPERIMENTS, Experiment, Needs
from trainer.reproduce.figures import DRAWINGS, FIGURE_START
from trainer.reproduce.records import RunRecord
from trainer.reproduce.runs import (
    CIFAR10_TRAIN,
    Identity,
    Matching,
    PlannedRun,
    Stale,
    identify_plan,
    match_records,
    plan_runs,
    seeds_of,
    smoke_overrides,
)
from trainer.reproduce.tables import build_table, format_markdown, format_text, table_json

_HAS: dict[Needs, Callable[[RunRecord, str], bool]] = {
    "nothing": lambda record, on: True,
    "accuracy": lambda record, on: record.accuracy_on(on) is not None,
    "accuracy_per_epoch": lambda record, on: bool(record.curve_on(on)),
    "rounds": lambda record, on: bool(record.rounds),
    "confusion": lambda record, on: bool((record.confusion or {}).get("predicted")),
    "suspects": lambda record, on: bool(record.suspects),
    "own_data": lambda record, on: False,
}
"""Whether a record has what an experiment needs, on its evaluation set."""

_TABLES: dict[str, Mapping[str, Mapping[str, paper.Reported]]] = {
    "table1": paper.TABLE1,
    "ablation": {},
    "without_coteaching": paper.TABLE1,
    "f_correction": paper.TABLE1,
    "decoupling_eval_first": paper.TABLE1,
}
"""Experiments that are tables of accuracies, with the paper's values of their rows."""


@dataclass(frozen=True)
class Outcome:
    """An experiment with the runs that it needs, and those that are recorded."""

    experiment: Experiment
    planned: list[PlannedRun]
    """For the seeds that were asked for."""
    matching: Matching
    records: Mapping[str, RunRecord]
    options: tuple[str, ...] = ("--run",)
    """Options of `incv reproduce` that fill the gaps."""
    is_chosen: bool = False
    """Whether only some methods, settings or seeds were asked for."""

    def missing(self) -> list[PlannedRun]:
        """Return the runs that `incv reproduce --run` would execute."""
        return [] if self.experiment.needs == "own_data" else self.matching.missing(self.planned)

    def runs(self) -> dict[PlannedRun, RunRecord]:
        return {run: self.records[file] for run, file in self.matching.recorded.items()}


def collect_outcome(
    experiment: Experiment,
    records: Mapping[str, RunRecord],
    seeds: Sequence[int] | None = None,
    smoke: bool = False,
    options: Sequence[str] = ("--run",),
) -> Outcome:
    """Match the runs that an experiment needs with the recorded ones; seeds beyond `seeds` count if recorded.

    Records are matched with the runs of all experiments: one that counts for another is not stale for this one.
    seeds: None: as many as the experiment asks for, of which recorded ones of any seed count; options: of
    `incv reproduce`, for the commands that fill gaps.
    """
    every = seeds_of(records.values(), experiment.seeds if seeds is None else seeds)
    own = _plan(experiment, every, smoke)
    kinds = {(run.recipe, run.stage) for run in own}
    expected: dict[PlannedRun, Identity] = {}
    for run in (*own, *(run for other in EXPERIMENTS.values() for run in _plan(other, every, smoke))):
        if (run.recipe, run.stage) in kinds and run not in expected:
            expected[run] = identify_plan(run, None if smoke else CIFAR10_TRAIN)
    matching = match_records(
        expected, records, lambda record: _HAS[experiment.needs](record, experiment.evaluation_set)
    ).among(own)
    if seeds is None:
        asked = _take_enough(own, matching.recorded, experiment.seeds)
    else:
        asked = [run for run in own if run.seed in seeds]
    is_chosen = seeds is not None or experiment != EXPERIMENTS[experiment.name]
    return Outcome(experiment, asked, matching, records, tuple(options), is_chosen)


def _take_enough(
    runs: Sequence[PlannedRun], recorded: Collection[PlannedRun], seeds: Sequence[int]
) -> list[PlannedRun]:
    """Return as many runs of each cell as there are seeds: recorded ones first, then those of `seeds`."""
    cells: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        if run in recorded or run.seed in seeds:
            cells.setdefault((run.row, run.setting), []).append(run)
    enough = {
        run
        for cell in cells.values()
        for run in sorted(cell, key=lambda run: (run not in recorded, run.seed))[: len(seeds)]
    }
    return [run for run in runs if run in enough]


def _plan(experiment: Experiment, seeds: Sequence[int], smoke: bool) -> list[PlannedRun]:
    runs = plan_runs(experiment, seeds)
    tiny = smoke and experiment.needs != "own_data"
    return [run.with_overrides(smoke_overrides(run)) for run in runs] if tiny else runs


def describe_outcome(outcome: Outcome, results: Path) -> str:
    """Return what `incv reproduce` prints of an experiment. results: the folder of tables and figures."""
    experiment, parts = outcome.experiment, []
    if experiment.name in _TABLES:
        table = build_table(experiment, outcome.matching.recorded, outcome.records)
        parts.append(format_text(experiment, table, _TABLES[experiment.name]))
    else:
        parts.append(experiment.title)
    if (figure := results / _figure_path(experiment)).exists():
        parts.append(f"figure: {figure}")
    if experiment.needs == "nothing":
        return "\n".join([*parts, "  follows from the theory: no run is needed"])
    if experiment.needs == "own_data":
        return "\n".join([*parts, *_describe_own_data(outcome)])
    have = len(outcome.planned) - len(outcome.missing())
    parts.append(f"\n{have} of {len(outcome.planned)} runs are recorded")
    parts += _list("stale, and not used", outcome.matching.stale)
    parts += _list("recorded twice, and not used", outcome.matching.superseded)
    if commands := fill_commands(experiment.name, outcome.missing(), outcome.options):
        whole = shlex.join(["incv", "reproduce", experiment.name, *outcome.options])
        at_once = [] if outcome.is_chosen else [f"  {whole}   # all of these:"]
        parts += ["to fill the gaps:", *at_once, *(f"  {command}" for command in commands)]
    return "\n".join(parts)


def _describe_own_data(outcome: Outcome) -> list[str]:
    """Say how the runs are started, and what the paper reports of them."""
    lines = []
    if outcome.experiment.name == "table2":
        lines.append(f"\n{'paper: top-1 (top-5) in percent':<34}{'WebVision':>14}{'ILSVRC12':>16}")
        lines += [f"{title:<34}{web:>14}{imagenet:>16}" for title, web, imagenet in _table2(outcome.experiment)]
    lines.append("\nnothing is recorded; each run by itself (add --dry-run for its estimated time and cost):")
    return [*lines, *(f"  {run.command}" for run in outcome.planned)]


def _table2(experiment: Experiment) -> list[tuple[str, str, str]]:
    titles = {row.name: row.title for row in experiment.rows}
    return [(titles[name], *values) for name, values in paper.TABLE2.items() if name in titles]


def _list(what: str, stale: Sequence[Stale]) -> list[str]:
    return [f"{what}:", *(f"  {each.file}: {'; '.join(each.reasons)}" for each in stale)] if stale else []


def fill_commands(name: str, missing: Sequence[PlannedRun], options: Sequence[str] = ("--run",)) -> list[str]:
    """Return one command for each cell of an experiment with missing runs. options: of all of them."""
    cells: dict[tuple[str, str], list[int]] = {}
    for run in missing:
        cells.setdefault((run.row, run.setting), []).append(run.seed)
    return [
        shlex.join(
            [
                *("incv", "reproduce", name, *options, "--methods", row, "--settings", setting),
                *("--seeds", ",".join(map(str, sorted(seeds)))),
            ]
        )
        for (row, setting), seeds in cells.items()
    ]


def find_unrelated(records: Mapping[str, RunRecord]) -> list[str]:
    """Return the files of records whose recipe and method belong to no experiment."""
    kinds = {(run.recipe, run.stage) for each in EXPERIMENTS.values() for run in plan_runs(each, (0,))}
    return [file for file, record in records.items() if (record.recipe, record.method) not in kinds]


def write_outcomes(outcomes: Sequence[Outcome], results: Path, page: Path | None) -> list[Path]:
    """Write tables (JSON) and figures to the folder `results`, and fill `page`, if it exists."""
    written, parts = [], {}
    for outcome in outcomes:
        for path, text in build_files(outcome).items():
            written.append(results / path)
            (results / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(text, str):
                write_bytes(results / path, text.encode())
            else:
                write_json(results / path, text)
        parts[outcome.experiment.name] = build_part(outcome)
    if page is not None and page.exists():
        before = page.read_text()
        if (after := fill_page(before, parts)) != before:
            write_bytes(page, after.encode())
            written.append(page)
    return written


def require_replaceable_files(experiments: Sequence[Experiment], results: Path, force: bool) -> None:
    """Raise InputError if a table or figure would replace a file that is none, unless `force` is set."""
    for each in experiments:
        starts = {}
        if each.name in _TABLES:
            starts[f"{each.name}.json"] = f'{{\n  "{each.rows[0].name}": {{'.encode()
        if each.name in DRAWINGS:
            starts[_figure_path(each)] = FIGURE_START
        for path, start in starts.items():
            require_replaceable(
                results / path, start, force, "output of `incv reproduce`", "choose another --results"
            )


def build_files(outcome: Outcome) -> dict[str, str | dict[str, Any]]:
    """Return the files of an experiment by their path in the folder of results: text, or content for JSON."""
    experiment = outcome.experiment
    files: dict[str, str | dict[str, Any]] = {}
    if experiment.name in _TABLES:
        table = build_table(experiment, outcome.matching.recorded, outcome.records)
        files[f"{experiment.name}.json"] = table_json(experiment, table, _TABLES[experiment.name])
    if experiment.name in DRAWINGS and (figure := DRAWINGS[experiment.name](experiment, outcome.runs())):
        files[_figure_path(experiment)] = figure
    return files


def _figure_path(experiment: Experiment) -> str:
    """Return the path of an experiment's figure in the folder of results."""
    return f"figures/{experiment.name}.svg"


def build_part(outcome: Outcome) -> str:
    """Return the generated part of docs/results.md for an experiment."""
    experiment = outcome.experiment
    if experiment.name in _TABLES:
        table = build_table(experiment, outcome.matching.recorded, outcome.records)
        return format_markdown(experiment, table, _TABLES[experiment.name])
    if experiment.name == "table2":
        head = ["| paper: top-1 (top-5) in percent | WebVision | ILSVRC12 |", "|---|---|---|"]
        return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in _table2(experiment))])
    figure = next((path for path in build_files(outcome) if path.endswith(".svg")), None)
    return f"![{experiment.title}](../results/{figure})" if figure else "No run is recorded yet."


def begin_marker(name: str) -> str:
    return f"<!-- {name}: written by `incv reproduce --write`; do not edit -->"


def end_marker(name: str) -> str:
    return f"<!-- end of {name} -->"


def fill_page(page: str, parts: Mapping[str, str]) -> str:
    """Replace what stands between the markers of each part; a part that the page does not mark is left out.

    Raises DataError if a marker has no partner.
    """
    for name, text in parts.items():
        begin, end = begin_marker(name), end_marker(name)
        if begin not in page and end not in page:
            continue
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise DataError(f"docs/results.md: a part needs both markers, `{begin}` and then `{end}`")
        page = f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"
    return page
