"""Reads the training curves of a run from its metrics.jsonl files, thinned to at most 200 points of each kind."""

import json
import math
from pathlib import Path
from typing import Any

from trainer.records.pace import remove_times
from trainer.records.run_directory import RunDirectory

MOST_POINTS = 200


def read_curves(run: RunDirectory) -> dict[str, Any]:
    """Return {"rounds": {"1": {"fold 1": columns, ...}}, "methods": {method: columns}}; numbered from 1."""
    rounds: dict[str, dict[str, Any]] = {}
    for (number, fold), path in run.fold_metrics().items():
        if columns := read_metrics(path):
            rounds.setdefault(str(number + 1), {})[f"fold {fold + 1}"] = columns
    methods = {name: columns for name, path in run.method_metrics().items() if (columns := read_metrics(path))}
    return {"rounds": rounds, "methods": methods}


def read_metrics(path: Path) -> dict[str, list[float | None]]:
    """Return the numeric columns of one metrics.jsonl, thinned; {} for an empty file.

    The lines of steps and those of evaluations are thinned separately: together, one kind could lose all its lines.
    """
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break  # a killed run may leave an incomplete last line, which a resume removes
        if isinstance(line, dict):
            lines.append(line)
    kinds = [[at for at, line in enumerate(lines) if _is_of_steps(line) == wanted] for wanted in (True, False)]
    lines = [remove_times(lines[at]) for at in sorted(thin(kinds[0]) + thin(kinds[1]))]
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if _number(value) is not None)
    return {key: [_number(line.get(key)) for line in lines] for key in keys}


def _is_of_steps(line: dict[str, Any]) -> bool:
    return "learning_rate" in line


def thin(points: list[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
