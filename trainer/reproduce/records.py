"""Recorded runs: results/runs/*.json, one file for each method of a run; results/README.md describes the fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shards.durable import read_json
from shards.errors import DataError

_ADVICE = "correct it, or move it elsewhere (results/README.md describes the fields)"

Percent = Annotated[float, Field(ge=0, le=100)]


class Accuracy(BaseModel):
    """Accuracies of a method on one evaluation set, in percent."""

    top1: Percent
    """Mean of the networks."""
    top5: Percent | None = None
    top1_each: list[Percent] = []
    """Of each network."""
    top1_ensemble: Percent | None = None
    """Of the mean of both networks' probabilities; None for a method with one network."""
    top5_ensemble: Percent | None = None
    count: int | None = None
    """Number of images."""


class RunRecord(BaseModel):
    """What a table, a figure or a comparison needs from one finished run."""

    model_config = ConfigDict(extra="allow", frozen=True)

    recipe: str
    """Name of the shipped recipe."""
    method: str
    """The method, or `incv` for a run without one."""
    seed: int
    command: str
    """The command that executes this run alone."""
    accuracy: dict[str, dict[str, Accuracy]]
    """By evaluation set and method; {} for a run without methods."""
    keys: dict[str, Any]
    """The result keys of the method's stage, from the manifest."""
    numerics: dict[str, int]
    """Numerics versions of the method and of the stages that it builds on."""
    accuracy_per_epoch: dict[str, list[float]] = {}
    """By evaluation set: mean accuracy of the networks after every evaluated epoch, in percent."""
    rounds: list[dict[str, Any]] = []
    """One entry per round of INCV: counts, label precision and recall, the theory's values."""
    noise: dict[str, float | None] = {}
    """The true noise ratio, and INCV's estimates by name."""
    selection: dict[str, Any] | None = None
    """Counts of INCV's last selection, total and by class."""
    confusion: dict[str, Any] | None = None
    """T, its estimate, and M from the held-out predictions of the first round."""
    suspects: list[dict[str, Any]] = []
    """The most suspicious labels of a run without methods, with their images."""
    commit: str | None = None
    code: str | None = None
    """Hash of the source code of the last start."""
    machine: str | None = None
    date: str | None = None
    precision: str | None = None
    versions: dict[str, str] = {}
    starts: int = 1
    minutes: float | None = None
    stage_seconds: dict[str, float | None] = {}
    note: str | None = None

    def accuracy_on(self, evaluation_set: str) -> Accuracy | None:
        return self.accuracy.get(evaluation_set, {}).get(self.method)

    def curve_on(self, evaluation_set: str) -> list[float]:
        return self.accuracy_per_epoch.get(evaluation_set, [])


def read_records(folder: Path) -> dict[str, RunRecord]:
    """Return all records of a folder by file name; raises DataError that names a file that is none."""
    return {path.name: read_record(path) for path in sorted(folder.glob("*.json")) if path.is_file()}


def read_record(path: Path) -> RunRecord:
    """Raises DataError that names the file if it is not a record."""
    try:
        content = read_json(path)
    except DataError as error:
        raise DataError(f"{error}; {_ADVICE}") from None
    return parse_record(content, path)


def parse_record(content: Any, path: Path) -> RunRecord:
    """Check the content of a file; raises DataError that names the file and the field."""
    if not isinstance(content, Mapping):
        raise DataError(f"{path} is not a recorded run, but a JSON {type(content).__name__}: {_ADVICE}")
    try:
        return RunRecord.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is not a recorded run: `{field}`: {first['msg'].lower()}; {_ADVICE}") from None
