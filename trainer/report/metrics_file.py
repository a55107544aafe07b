"""Reads metrics.jsonl, the numbers of a training by step, for curves and comparisons."""

import json
import math
from pathlib import Path
from typing import Any

from trainer.records.pace import remove_times

MOST_POINTS = 200
"""Of each kind of line."""

Columns = dict[str, list[float | None]]


def read_metrics(path: Path) -> Columns:
    """Return the numeric columns of one metrics.jsonl, thinned; {} for an empty file.

    The lines of steps and those of evaluations are thinned separately: together, one kind could lose all its lines.
    """
    lines = _read_lines(path)
    kinds = [[at for at, line in enumerate(lines) if ("learning_rate" in line) == wanted] for wanted in (True, False)]
    lines = [remove_times(lines[at]) for at in sorted(thin(kinds[0]) + thin(kinds[1]))]
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if _number(value) is not None)
    return {key: [_number(line.get(key)) for line in lines] for key in keys}


def read_pace(path: Path) -> tuple[float, float] | None:
    """Return the images per second of a training, and the share of the time that it waited for them; None if unknown.

    Both are means over its steps, but for the first of each start, without evaluations and checkpoints.
    """
    steps = seconds = waited = last = 0.0  # seconds: as if a step had one image
    for line in _read_lines(path):
        step, rate, wait = (_number(line.get(key)) for key in ("step", "images_per_s", "data_wait"))
        if step is not None and rate and wait is not None:
            steps += step - last
            seconds += (step - last) / rate
            waited += wait * (step - last) / rate
        last = step or last
    return (steps / seconds, waited / seconds) if seconds else None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            break  # a killed run may leave an incomplete last line, which a resume removes
        if isinstance(line, dict):
            lines.append(line)
    return lines


def thin(points: list[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most `most` points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
