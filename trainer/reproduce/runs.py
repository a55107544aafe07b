"""The runs that experiments need, and the recorded runs that are these.

A planned and a recorded run are the same if their result keys and the numerics versions of their stages are.
"""

import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from trainer.config.shipped import RECIPES
from trainer.reproduce.experiments import RECORDED_WITH, TEST, Experiment, Row, Setting
from trainer.reproduce.records import RunRecord
from trainer.run.recipe import load_recipe
from trainer.run.stage_graph import numerics_behind, stage_keys

Keys = Mapping[str, Any]
_MISSING = object()

CHOOSES_EPOCH = "evaluation.choose_on"
"""The key of a run whose result is that of its best epoch, not of the last."""

CIFAR10_TRAIN = "ab99971fbd2db7beecfecea8fa315767ee985619d2753a81333efda40bafeae2"
"""Checksum of the packed training images of CIFAR-10, the same for the binary and the Python version."""

_SMOKE = (
    "precision=fp32",
    "data.train.limit=40",
    "image.size=8",
    "image.resize=8",
    "image.pad=0",
    "model={name: digits_cnn}",
    "batch={global: 8}",
    "execution={device: cpu, threads: 1, log_every: 2, checkpoint_every: 3}",
)
_SMOKE_OPTIMIZER = ("learning_rate=0.01", "decay_scope=all")  # there are no residual blocks


@dataclass(frozen=True)
class PlannedRun:
    """One run that an experiment needs."""

    row: str
    setting: str
    seed: int
    recipe: str
    stage: str
    overrides: tuple[str, ...]
    also: tuple[str, ...] = ()
    """As in `Row`."""
    evaluation_set: str = TEST
    """As in `Experiment`."""

    @property
    def slug(self) -> str:
        """The name of the run, which its record and its log lines have."""
        return f"{self.recipe.partition('_')[0]}_{self.setting}-{self.row}-seed{self.seed}"

    @property
    def command(self) -> str:
        """The command that executes this run alone."""
        return shlex.join(["incv", "run", "-c", self.recipe, *self.overrides])

    def with_overrides(self, extra: Sequence[str]) -> "PlannedRun":
        return replace(self, overrides=(*self.overrides, *extra))


def plan_runs(experiment: Experiment, seeds: Sequence[int]) -> list[PlannedRun]:
    """Return the runs that an experiment needs, seed by seed: the first seed of all cells comes first."""
    return [_plan_run(experiment, row, setting, seed) for seed in seeds for row, setting in iterate_cells(experiment)]


def iterate_cells(experiment: Experiment) -> Iterator[tuple[Row, Setting]]:
    for row in experiment.rows:
        for setting in experiment.settings:
            yield row, setting


def _plan_run(experiment: Experiment, row: Row, setting: Setting, seed: int) -> PlannedRun:
    overrides = (f"seed={seed}", *row.overrides, *setting.overrides, *RECORDED_WITH)
    if experiment.needs == "own_data":
        overrides = (f"seed={seed}", *row.overrides)  # the recipe has the rest
    if row.stage == "incv":  # it trains no method that could be evaluated
        overrides = tuple(each for each in overrides if not each.startswith("evaluation."))
    recipe = setting.recipe + row.suffix
    return PlannedRun(row.name, setting.name, seed, recipe, row.stage, overrides, row.also, experiment.evaluation_set)


def drop_parts(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the different runs among these, without those that are part of another one of them."""
    parts = {(row, run.setting, run.seed) for run in runs for row in run.also}
    return [run for run in dict.fromkeys(runs) if (run.row, run.setting, run.seed) not in parts]


def smoke_overrides(run: PlannedRun) -> tuple[str, ...]:
    """Return the overrides that make a planned run a matter of a second.

    What experiments vary, such as Cutout and the schedule, stays.
    """
    has_cutout = run.recipe.endswith("_plus") and "image.cutout=0" not in run.overrides
    epochs = dict.fromkeys(() if run.stage == "incv" else (*run.also, run.stage), 3)
    if "incv=null" not in run.overrides:
        epochs["incv"] = 1
    trains = [f"{name}.epochs={count}" for name, count in epochs.items()]
    trains += [f"{name}.optimizer.{text}" for name in epochs for text in _SMOKE_OPTIMIZER]
    image = ("image.cutout=4",) if has_cutout else ()
    limit = f"data.eval.{run.evaluation_set}.limit=20"
    return (*_SMOKE, limit, *image, *trains, *(("incv.min_per_class=1",) if "incv" in epochs else ()))


@dataclass(frozen=True)
class Identity:
    """What decides the result of a run: its result keys, and the numerics versions of its stages."""

    keys: Keys
    numerics: Mapping[str, int] = field(default_factory=dict)


def identify_plan(run: PlannedRun, checksum: str | None = CIFAR10_TRAIN) -> Identity:
    """Return the identity that a planned run would have today. checksum: of CIFAR-10's `train`; None: any."""
    identity = _identify(run.recipe, run.stage, run.overrides)
    data = (identity.keys.get("data.train.source"), identity.keys.get("data.train.split", "train"))
    is_known = checksum is not None and data == ("cifar10", "train")
    facts = {"data.train.checksum": checksum} if is_known else {}
    return Identity({**identity.keys, **facts}, identity.numerics)


@cache
def _identify(recipe: str, stage: str, overrides: Sequence[str]) -> Identity:
    loaded = load_recipe(RECIPES / f"{recipe}.yaml", overrides)
    keys = stage_keys(loaded, {})
    return Identity(keys[stage], numerics_behind(stage, loaded))


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
