"""The results of the runs of `--vary` in one table, with mean and standard deviation over seeds."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pyarrow as pa

from shards.csv_file import write_csv
from shards.durable import write_json
from trainer.report.text import align_table, shorten

_NOISE = {
    "paper": "noise, paper",
    "confident": "noise, confident",
    "confidence_curve": "noise, confidence curve",
    "true": "noise, true",
}
_SELECTION = {"label_precision": "precision", "label_recall": "recall"}
_AGREEMENT = "agreement, round 1"
"""Of held-out predictions with the given labels. It needs no true label: settings of INCV can be chosen by it."""
_NAME_WIDTH = 34
_KEY = re.compile(r"(?:(?<= )|^)[\w.]+(?==)")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its overrides, its directory and its report, None unless it has finished."""

    overrides: tuple[str, ...]
    root: Path
    report: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return " ".join(self.overrides)

    @property
    def group(self) -> str:
        """The overrides without the seed: runs that share them differ by chance alone."""
        return " ".join(one for one in self.overrides if not one.startswith("seed="))


def results_of(report: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the known results of a report by column, all in percent."""
    if report is None:
        return {}
    noise, selection = report.get("noise") or {}, report.get("selection") or {}
    shares = {column: noise.get(key) for key, column in _NOISE.items()}
    if rounds := report.get("rounds"):
        shares[_AGREEMENT] = rounds[0].get("agreement")
    shares |= {column: selection.get(key) for key, column in _SELECTION.items()}
    found = {column: 100 * share for column, share in shares.items() if share is not None}
    for name, methods in (report.get("accuracy") or {}).items():
        found |= {f"{name}, {key}": each["top1"] for key, each in methods.items() if each["top1"] is not None}
    return found


def summarise_sweep(runs: Sequence[SweepRun]) -> dict[str, Any]:
    """Return the results of each run, and their mean and standard deviation over runs that differ in the seed only.

    The standard deviation is that of a sample (n - 1); groups of one finished run are left out.
    """
    results = [results_of(run.report) for run in runs]
    columns = list(dict.fromkeys(column for found in results for column in found))
    groups: dict[str, list[dict[str, float]]] = {}
    for run, found in zip(runs, results, strict=True):
        if found:
            groups.setdefault(run.group, []).append(found)
    summaries = []
    for group, members in groups.items():
        if len(members) < 2:
            continue
        values = {column: [found[column] for found in members if column in found] for column in columns}
        known = {column: each for column, each in values.items() if len(each) > 1}
        summaries.append(
            {
                "overrides": group,
                "runs": len(members),
                "mean": {column: mean(each) for column, each in known.items()},
                "sd": {column: stdev(each) for column, each in known.items()},
            }
        )
    return {
        "unit": "percent",
        "columns": columns,
        "runs": [
            {"overrides": run.name, "run": str(run.root), "finished": run.report is not None, "results": found}
            for run, found in zip(runs, results, strict=True)
        ],
        "over_seeds": summaries,
    }


def format_sweep(summary: Mapping[str, Any]) -> str:
    """Format a summary as a plain-text table: a line for each run, then one for each group of seeds."""
    columns = summary["columns"]
    if not columns:
        return "no run has finished: there are no results to compare"
    lines = [["in percent", *columns]]
    for run in summary["runs"]:
        cells = [f"{run['results'][column]:.1f}" if column in run["results"] else "–" for column in columns]
        lines.append([run["overrides"], *cells])
    for group in summary["over_seeds"]:
        cells = [
            f"{group['mean'][column]:.1f} ± {group['sd'][column]:.1f}" if column in group["mean"] else "–"
            for column in columns
        ]
        lines.append([f"{group['overrides']} mean ± sd of {group['runs']}".strip(), *cells])
    names = _short_names([line[0] for line in lines])
    table = align_table([[name, *line[1:]] for name, line in zip(names, lines, strict=True)])
    return textwrap.indent(table, "  ")


def _short_names(names: Sequence[str]) -> list[str]:
    """Shorten keys to their last part, and long names at their end, as far as all names stay different."""
    keys = {key for name in names for key in _KEY.findall(name)}
    last = {key: key.rpartition(".")[2] for key in keys}
    unique = {key: part if list(last.values()).count(part) == 1 else key for key, part in last.items()}
    told = [_KEY.sub(lambda found: unique[found[0]], name) for name in names]
    cut = [shorten(name, _NAME_WIDTH) for name in told]
    return cut if len(set(cut)) == len(set(told)) else told


def write_sweep(summary: Mapping[str, Any], path: Path) -> None:
    """Write the summary as JSON to `path`, and the results of the runs, a line each, as CSV beside it."""
    write_json(path, summary)
    runs = summary["runs"]
    table: dict[str, pa.Array] = {
        "overrides": pa.array([run["overrides"] for run in runs], pa.string()),
        "run": pa.array([run["run"] for run in runs], pa.string()),
    }
    for column in summary["columns"]:
        table[column] = pa.array([run["results"].get(column) for run in runs], pa.float64())
    write_csv(path.with_suffix(".csv"), pa.table(table))
