"""Finds files of a run directory that are missing or damaged, so that the report can show the rest and name them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import yaml

from shards.durable import read_json, read_parquet
from shards.errors import InputError
from trainer.records.run_directory import RunDirectory

_TABLES = {
    "labels.parquet": ("sample_id", "label"),
    "true_labels.parquet": ("sample_id", "label"),
    "selection.parquet": ("state", "round", "predicted", "loss", "given_probability"),
    "predictions.parquet": ("sample_id", "predicted", "status", "given_probability", "predicted_probability"),
    "labels_review.parquet": ("key", "given_label", "checked"),
}
"""The columns that the report reads."""

_NEEDED = {
    "config.resolved.yaml": "the recipe's keys and methods are unknown",
    "manifest.json": "the recipe's name, the time of each stage, the starts and, without shards, the names of the "
    "classes are unknown",
    "labels.parquet": "samples and classes cannot be counted, and no label is shown",
}
"""Files that every run has, and what the report lacks without them."""

_Damage = (InputError, OSError, ValueError, KeyError, pa.ArrowException, yaml.YAMLError, json.JSONDecodeError)


class ReadableRun(RunDirectory):
    """A run directory in which files that cannot be read count as missing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.damaged = dict(_find_damage(RunDirectory(root)))
        """What is wrong with a file, by path."""
        hidden = root / ".damaged"  # does not exist
        for name, path in vars(self).items():
            if isinstance(path, Path) and path in self.damaged:
                setattr(self, name, hidden / path.name)
        self._hidden = hidden

    def round_files(self, name: str) -> dict[int, Path]:
        return {number: path for number, path in super().round_files(name).items() if path not in self.damaged}

    def round_predictions(self, number: int) -> Path:
        path = super().round_predictions(number)
        return self._hidden / path.name if path in self.damaged else path


def find_gaps(run: ReadableRun) -> dict[str, str]:
    """Return a sentence for each file that is damaged, or missing although every run has it."""
    gaps = {}
    for path, problem in run.damaged.items():
        name = str(path.relative_to(run.root))
        then = f", so {_NEEDED[name]}" if name in _NEEDED else "; the report is made without it"
        gaps[name] = f"{name} cannot be read ({problem}){then}."
    for name, loss in _NEEDED.items():
        if not (run.root / name).exists():
            gaps[name] = f"{name} is missing, so {loss}."
    selected = run.round_files("selection.parquet")
    for number in sorted(selected.keys() - RunDirectory(run.root).round_files("predictions.parquet").keys()):
        name = f"rounds/{number}/predictions.parquet"
        lost = "the estimates per class and the confusion" if number == 0 else "repeated predictions"
        gaps[name] = f"{name} is missing, so the report lacks {lost}."
    return gaps


def _find_damage(run: RunDirectory) -> Iterator[tuple[Path, str]]:
    """Yield each file that exists and cannot be read, with the problem in words."""
    tables = [run.labels, run.true_labels, run.selection, run.labels_review_parquet]
    for name in ("selection.parquet", "predictions.parquet"):
        tables += run.round_files(name).values()
    for path in filter(Path.exists, tables):
        try:
            found = read_parquet(path, "table of this run", list(_TABLES[path.name])).column_names
            if lacking := [name for name in _TABLES[path.name] if name not in found]:
                yield path, f"it lacks the column {lacking[0]}"
        except _Damage:
            yield path, "not a table of this version"
    for path in filter(Path.exists, (run.manifest, run.incv, run.evaluation, run.corrections)):
        try:
            if not isinstance(read_json(path), dict):
                yield path, "not an object"
        except _Damage:
            yield path, "not valid JSON"
    if run.config.exists():
        try:
            if not isinstance(yaml.safe_load(run.config.read_text()) or {}, dict):
                yield run.config, "not a mapping"
        except _Damage:
            yield run.config, "not valid YAML"
