"""Summarises groups of runs: accuracy, INCV's selection, curves and cost; pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from trainer.compare.grouping import (
    Difference,
    Group,
    find_environment_differences,
    find_group_differences,
    group_runs,
    name_variants,
)
from trainer.compare.runs import ComparedRun
from trainer.report.text import choose_form, format_duration, shorten
from trainer.reproduce.experiments import Experiment, Row, Setting
from trainer.reproduce.figures import mean_curve, mean_over_rounds
from trainer.reproduce.runs import CHOOSES_EPOCH, PlannedRun
from trainer.reproduce.tables import Table, build_table, summarise, table_lines
from trainer.run.stage_graph import list_stages

Points = list[tuple[float, float | None]]
Lines = list[list[str]]
"""The cells of a table, its head first."""

_MOST_RECIPES = 5  # columns of a table of accuracies; more recipes have a row each
_VARIANT_WIDTH = 60
_NOISE = {"true": "true", "paper": "paper", "confident": "confident", "confidence_curve": "confidence curve"}


@dataclass(frozen=True)
class AccuracyTable:
    """The accuracies on one evaluation set, in the form of Table 1: methods by recipes."""

    evaluation_set: str
    experiment: Experiment
    table: Table

    @property
    def lines(self) -> Lines:
        return table_lines(self.experiment, self.table, {})


@dataclass(frozen=True)
class Curves:
    """One line for each group that recorded the quantity, mean over its seeds."""

    title: str
    x_label: str
    lines: tuple[tuple[Group, Points], ...]


@dataclass(frozen=True)
class Comparison:
    """All that `incv compare` shows."""

    groups: list[Group]
    recipe: list[Difference]
    environment: list[Difference]
    accuracy: list[AccuracyTable]
    selection: Lines
    """INCV's estimates and its last selection; no lines if no run used INCV."""
    curves: list[Curves]
    cost: Lines
    notes: list[str]


def compare_runs(runs: Sequence[ComparedRun]) -> Comparison:
    groups = group_runs(runs)
    environment = find_environment_differences(groups)
    return Comparison(
        groups,
        find_group_differences(groups),
        environment,
        _tabulate_accuracy(groups),
        _tabulate_selection(groups),
        [each for each in _collect_curves(groups) if each.lines],
        _tabulate_cost(groups),
        _collect_notes(groups, environment),
    )


def _tabulate_accuracy(groups: Sequence[Group]) -> list[AccuracyTable]:
    """Return a table for each evaluation set, with methods as rows and recipes as columns.

    A recipe that extends another, as `cifar10_sym50_plus` extends `cifar10_sym50`, has a row in its column.
    """
    sets = dict.fromkeys(name for group in groups for run in group.runs for name in run.record.accuracy)
    return [_tabulate_set(groups, name) for name in sets]


def _tabulate_set(groups: Sequence[Group], name: str) -> AccuracyTable:
    known = [group for group in groups if any(run.record.accuracy_on(name) for run in group.runs)]
    variants = name_variants([group.runs[0] for group in known])  # groups of other tables need not be told apart
    known = [replace(group, variant=variant) for group, variant in zip(known, variants, strict=True)]
    recipes = list(dict.fromkeys(group.family for group in known))
    is_wide = len(recipes) > _MOST_RECIPES

    def place(group: Group) -> tuple[str, str]:
        return (group.name, "") if is_wide else (group.row, group.family)

    titles = {place(group)[0]: _title(group, is_wide) for group in known}
    clashing = {title for title in titles.values() if list(titles.values()).count(title) > 1}
    numbers = {row: [group.number for group in known if place(group)[0] == row] for row in titles}
    rows = [
        Row(row, f"{title} ({', '.join(map(str, numbers[row]))})" if title in clashing else title, "")
        for row, title in titles.items()
    ]
    settings = [Setting(recipe, recipe, recipe) for recipe in ([""] if is_wide else recipes)]
    chooses = [CHOOSES_EPOCH in group.runs[0].identity.keys for group in known]
    epoch = "chosen epoch" if all(chooses) else "last epoch, or the chosen one" if any(chooses) else "last epoch"
    experiment = Experiment(
        "compare", f"accuracy on {name}", "accuracy", tuple(rows), tuple(settings), evaluation_set=name, epoch=epoch
    )
    recorded, records = {}, {}
    for group in known:
        row, setting = place(group)
        for run in group.runs:
            file = f"{group.number} {run.name}"
            recorded[PlannedRun(row, setting, run.record.seed, group.recipe, group.method, ())] = file
            records[file] = run.record
    return AccuracyTable(name, experiment, build_table(experiment, recorded, records))


def _title(group: Group, with_recipe: bool) -> str:
    head = f"{group.recipe}, {group.method}" if with_recipe else group.title
    return f"{head}, {shorten(group.variant, _VARIANT_WIDTH)}" if group.variant else head


def _tabulate_selection(groups: Sequence[Group]) -> Lines:
    """Return label precision and recall after the last round, with the theory's, and the noise estimates."""
    known = [group for group in groups if any(run.record.rounds for run in group.runs)]
    columns: dict[str, Callable[[ComparedRun], float | None]] = {
        "LP (%)": lambda run: _percent(_last_round(run).get("label_precision")),
        "LP, theory": lambda run: _percent((_last_round(run).get("theory") or {}).get("label_precision")),
        "LR (%)": lambda run: _percent(_last_round(run).get("label_recall")),
        "LR, theory": lambda run: _percent((_last_round(run).get("theory") or {}).get("label_recall")),
    }
    for key, title in _NOISE.items():
        columns[f"noise, {title} (%)"] = lambda run, key=key: _percent(run.record.noise.get(key))  # type: ignore[misc]
    lines = [["", "selected", *columns]]
    for group in known:
        runs = [run for run in group.runs if run.record.rounds]
        selected = [count for run in runs if (count := _last_round(run).get("selected")) is not None]
        kept = f"{mean(selected):,.0f}" if selected else "–"
        lines.append([str(group.number), kept, *(_summarise(runs, read) for read in columns.values())])
    shown = [place for place in range(len(lines[0])) if place == 0 or any(line[place] != "–" for line in lines[1:])]
    return [[line[place] for place in shown] for line in lines] if known else []


def _summarise(runs: Sequence[ComparedRun], read: Callable[[ComparedRun], float | None]) -> str:
    summary = summarise([value for run in runs if (value := read(run)) is not None])
    return "–" if summary is None else str(summary)


def _last_round(run: ComparedRun) -> Mapping:
    return run.record.rounds[-1]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _collect_curves(groups: Sequence[Group]) -> list[Curves]:
    sets = dict.fromkeys(name for group in groups for run in group.runs for name in run.record.accuracy_per_epoch)
    found = [
        Curves(
            f"accuracy on {name} (%)",
            "epoch",
            tuple((group, points) for group in groups if (points := _mean_accuracies(group, name))),
        )
        for name in sets
    ]
    for key, title in (("loss", "training loss"), ("train_accuracy", "training accuracy")):
        each = tuple((group, points) for group in groups if (points := _mean_metric(group, key)))
        found.append(Curves(title, "epoch", each))
    for key, title in (("label_precision", "label precision (%)"), ("label_recall", "label recall (%)")):
        each = tuple((group, points) for group in groups if (points := _mean_rounds(group, key)))
        found.append(Curves(f"{title} after each round", "round", each))
    return found


def _mean_accuracies(group: Group, evaluation_set: str) -> Points:
    curves = [curve for run in group.runs if (curve := run.record.curve_on(evaluation_set))]
    keys = group.runs[0].identity.keys
    every, last = keys.get("evaluation.every") or 1, keys.get(f"{group.method}.epochs")
    return [(min((place + 1) * every, last or (place + 1) * every), y) for place, y in enumerate(mean_curve(curves))]


def _mean_metric(group: Group, key: str) -> Points:
    """Return a column of metrics.jsonl over epochs: the mean of the seeds that logged at the epochs of the first."""
    columns = [run.metrics for run in group.runs if run.metrics.get("epoch") and run.metrics.get(key)]
    alike = [each for each in columns if each["epoch"] == columns[0]["epoch"]]
    points: Points = []
    for place, epoch in enumerate(columns[0]["epoch"] if columns else ()):
        values = [value for each in alike if (value := each[key][place]) is not None]
        if epoch is not None and values:
            points.append((epoch, mean(values)))
    return points


def _mean_rounds(group: Group, key: str) -> Points:
    records = [run.record for run in group.runs if run.record.rounds]
    points = mean_over_rounds(records, lambda entry: _percent(entry.get(key))) if records else []
    return points if any(y is not None for _, y in points) else []


def sample_curves(curves: Curves, most: int = 8) -> Lines:
    """Return each line at a few places of the longest one, and its last value, for the terminal."""
    xs = max(([x for x, _ in points] for _, points in curves.lines), key=len)
    places = [xs[round(at * (len(xs) - 1) / (most - 1))] for at in range(most)] if len(xs) > most else xs
    lines = [["", *(f"{place:.1f}".removesuffix(".0") for place in places), "last"]]
    for group, points in curves.lines:
        values = [[y for x, y in points if x <= place] for place in places]
        ends = points[-1][0]
        shown = [
            "–" if not each or each[-1] is None or place > ends + 0.5 else _round(each[-1])
            for each, place in zip(values, places, strict=True)
        ]
        last = points[-1][1]
        lines.append([str(group.number), *shown, "–" if last is None else _round(last)])
    return lines


def _round(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def _tabulate_cost(groups: Sequence[Group]) -> Lines:
    """Return the mean time of each group's runs, by stage."""
    lines = [["", "total", "INCV", "training", "rest"]]
    untrained = [stage.name for stage in list_stages() if stage.numerics is None]
    for group in groups:
        times = [{name: value or 0.0 for name, value in run.record.stage_seconds.items()} for run in group.runs]
        times = [each for each in times if each]
        if not times:
            minutes = [run.record.minutes for run in group.runs if run.record.minutes is not None]
            lines.append([str(group.number), format_duration(60 * mean(minutes)) if minutes else "–", *["–"] * 3])
            continue
        incv = [each["incv"] for each in times if "incv" in each]
        training = [sum(value for name, value in each.items() if name not in ("incv", *untrained)) for each in times]
        rest = [sum(each.get(name, 0.0) for name in untrained) for each in times]
        total = mean(sum(each.values()) for each in times)
        parts = [mean(incv) if incv else None, mean(training), mean(rest)]
        lines.append([str(group.number), format_duration(total), *map(format_duration, parts)])
    return lines


def _collect_notes(groups: Sequence[Group], environment: Sequence[Difference]) -> list[str]:
    notes = []
    for group in groups:
        for run in group.runs:
            if run.unfinished:
                notes.append(
                    f"{run.name} has not finished ({', '.join(run.unfinished)}): {group.method} shows what is known"
                )
        for run in group.repeated:
            seed = run.record.seed
            notes.append(f"{run.name} does not count: another run of group {group.number} has seed {seed}")
    if any(each.key == "machine" for each in environment):
        notes.append("the runs are of different machines: their times are not comparable")
    single = [group.number for group in groups if len(group.runs) == 1]
    if single and len(groups) > 1:
        words = choose_form(len(single), "group has", "groups have")
        notes.append(f"{len(single)} {words} one seed, so no standard deviation: small differences mean nothing")
    return list(dict.fromkeys(notes))
