"""Joins planned runs with recorded ones by their result keys and numerics versions; pure functions."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.reproduce.planning import PlannedRun
from trainer.reproduce.records import RunRecord

Keys = Mapping[str, Any]
_MISSING = object()

CHOOSES_EPOCH = "evaluation.choose_on"
"""The key of a run whose result is that of its best epoch, not of the last."""


@dataclass(frozen=True)
class Identity:
    """What decides the result of a run: its result keys, and the numerics versions of its stages."""

    keys: Keys
    numerics: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stale:
    """A recorded run that is not used, and why."""

    file: str
    reasons: tuple[str, ...]
    run: PlannedRun
    """The planned run that it is closest to."""


@dataclass(frozen=True)
class Matching:
    """The recorded runs of an experiment."""

    recorded: dict[PlannedRun, str]
    """Planned runs with the file of their record."""
    stale: list[Stale]
    superseded: list[Stale]
    """Records of a run for which another record is used."""

    def among(self, runs: Collection[PlannedRun]) -> "Matching":
        """Return the part of the matching that concerns these runs."""
        return Matching(
            {run: file for run, file in self.recorded.items() if run in runs},
            [each for each in self.stale if each.run in runs],
            [each for each in self.superseded if each.run in runs],
        )

    def missing(self, planned: Iterable[PlannedRun]) -> list[PlannedRun]:
        return [run for run in planned if run not in self.recorded]


def match_records(
    expected: Mapping[PlannedRun, Identity],
    records: Mapping[str, RunRecord],
    is_complete: Callable[[RunRecord], bool] = lambda record: True,
) -> Matching:
    """Match each record with the planned run of its recipe, stage and seed that has the most similar result keys.

    A record counts only if no key and no numerics version differs; otherwise it is stale. Of several records of one
    run, the first one by date counts, so that repeating a run never replaces its result by a better one. is_complete:
    whether a record has all that the experiment needs; one that lacks something does not count.
    """
    candidates: dict[PlannedRun, list[str]] = {}
    stale = []
    for file, record in records.items():
        runs = [
            run
            for run in expected
            if (run.recipe, run.stage, run.seed) == (record.recipe, record.method, record.seed)
        ]
        if not runs:
            continue
        own = identify_record(record)
        reasons = {run: find_differences(own, expected[run]) for run in runs}
        nearest = min(runs, key=lambda run: len(reasons[run]))
        if reasons[nearest]:
            stale.append(Stale(file, reasons[nearest], nearest))
        elif is_complete(record):
            candidates.setdefault(nearest, []).append(file)
    recorded, superseded = {}, []
    for run, files in candidates.items():
        first, *others = sorted(files, key=lambda file: by_date(records[file], file))
        recorded[run] = first
        superseded += [Stale(file, (f"{first} was recorded first",), run) for file in others]
    return Matching(recorded, stale, superseded)


def identify_record(record: RunRecord) -> Identity:
    return Identity(record.keys, record.numerics)


def by_date(record: RunRecord, file: str) -> tuple[str, str]:
    """Return what to sort records by, the earliest first; those without a date come last."""
    return record.date or "9999", file


def find_differences(recorded: Identity, expected: Identity) -> tuple[str, ...]:
    """Return what differs, as text: `key (recorded -> expected)`.

    Checksums are compared only if both sides know them: a plan does not read the data.
    """
    before, after = comparable_keys(recorded.keys), comparable_keys(expected.keys)
    keys = [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _MISSING) != after.get(key, _MISSING)
        and not (is_checksum(key) and (key not in before or key not in after))
    ]
    differences = [f"{key} ({_show(before, key)} -> {_show(after, key)})" for key in keys]
    for stage, version in sorted(expected.numerics.items()):
        if (own := recorded.numerics.get(stage)) != version:
            differences.append(f"numerics of {stage} ({own} -> {version})")
    return tuple(differences)


def comparable_keys(keys: Keys) -> dict[str, Any]:
    """Return the keys that decide the result of the last epoch.

    Keys of evaluations do not, unless an evaluation chooses the epoch: they only record more.
    """
    decides = CHOOSES_EPOCH in keys
    return {key: value for key, value in keys.items() if decides or not key.startswith("evaluation.")}


def is_checksum(key: str) -> bool:
    return key.endswith("checksum")


def _show(keys: Keys, key: str) -> str:
    return json.dumps(keys[key]) if key in keys else "default"


def seeds_of(records: Iterable[RunRecord], seeds: Sequence[int]) -> list[int]:
    """Return `seeds` and all seeds that are recorded beyond them."""
    return list(dict.fromkeys([*seeds, *sorted({record.seed for record in records})]))
