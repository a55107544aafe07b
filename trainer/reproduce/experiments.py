"""The paper's experiments and our own by name, from experiments.yaml: their rows and settings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from shards.errors import ConfigError, did_you_mean

Needs = Literal["accuracy", "accuracy_per_epoch", "rounds", "confusion", "suspects", "nothing", "own_data"]
"""What an experiment reads from a recorded run. nothing: it follows from the theory; own_data: it needs WebVision,
and its runs are started one by one with `incv run`."""

Measure = Literal["last", "last_10", "ensemble"]
"""What a table states of a run: the accuracy after the last epoch, mean of the networks; the mean of the last 10
epochs; or the accuracy of the ensemble of both networks after the last epoch."""

SEEDS = (0, 1, 2)
"""The seeds that an experiment asks for unless `--seeds` names others; recorded runs of other seeds count instead.
The paper has five runs of each."""

TEST = "test"
"""The evaluation set of the paper's experiments."""


@dataclass(frozen=True)
class Setting:
    """One noise setting of CIFAR-10."""

    name: str
    title: str
    recipe: str
    """The shipped recipe of this setting."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe that make it this setting."""
    kind: str = ""
    """Kind of noise, for an experiment over noise ratios."""
    ratio: float = 0.0
    column: str = ""
    """The setting of the paper's table with whose values it is compared; empty: the one of its own name."""

    @property
    def names(self) -> frozenset[str]:
        """The names by which `--settings` chooses it."""
        return frozenset((self.name, self.column or self.name))


@dataclass(frozen=True)
class Row:
    """One method of an experiment."""

    name: str
    title: str
    stage: str
    """The stage of a run that gives the result: a training method, or `incv`."""
    overrides: tuple[str, ...] = ()
    suffix: str = ""
    """Appended to the name of the setting's recipe."""
    also: tuple[str, ...] = ()
    """Rows whose runs are part of a run of this one, because it reads the networks that they train."""
    headline: Measure = "last"
    """The measure that a table states first, and as `mean` in its JSON file."""


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its rows, its settings, and what it reads from their runs."""

    name: str
    title: str
    needs: Needs
    rows: tuple[Row, ...] = ()
    settings: tuple[Setting, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    evaluation_set: str = TEST
    """The evaluation set whose accuracy a table states."""
    epoch: str = "last epoch"
    """The epoch whose networks a table evaluates, in words."""


RECORDED_WITH = ("precision=bf16", "evaluation.every=1")
"""How all runs of Table 1 are made: fast, and with the test accuracy of every epoch."""


def _read_experiments(path: Path) -> dict[str, Experiment]:
    content = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: _build(Experiment, {"name": name, **each}) for name, each in content["experiments"].items()}


def _build(kind: type, fields: Mapping[str, Any]) -> Any:
    """Build a record of this kind, with tuples for lists."""
    kinds = {"rows": Row, "settings": Setting}
    return kind(
        **{
            key: tuple(_build(kinds[key], each) if key in kinds else each for each in value)
            if isinstance(value, list)
            else value
            for key, value in fields.items()
        }
    )


EXPERIMENTS = _read_experiments(Path(__file__).with_suffix(".yaml"))


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Return the experiments of these names, or all; raises ConfigError with near matches."""
    for name in names:
        if name not in EXPERIMENTS:
            raise ConfigError(f"no experiment {name!r}; {did_you_mean(name, EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names)] or list(EXPERIMENTS.values())


def select_cells(
    experiments: Sequence[Experiment], methods: Sequence[str] | None, settings: Sequence[str] | None
) -> list[Experiment]:
    """Return the experiments with these rows and settings alone; None: all. Raises ConfigError with near matches.

    A setting may also have the name of the paper's one that it is compared with. A name must be known to one of the
    experiments, and an experiment without rows is left as it is.
    """
    _require_known("--methods", methods, [row.name for each in experiments for row in each.rows])
    known = [setting for each in experiments for setting in each.settings]
    _require_known("--settings", settings, [name for setting in known for name in sorted(setting.names)])
    return [
        replace(
            each,
            rows=tuple(row for row in each.rows if methods is None or row.name in methods),
            settings=tuple(one for one in each.settings if settings is None or not one.names.isdisjoint(settings)),
        )
        for each in experiments
    ]


def _require_known(option: str, names: Sequence[str] | None, known: Iterable[str]) -> None:
    every = list(dict.fromkeys(known))
    for name in names or ():
        if name not in every:
            raise ConfigError(f"{option} {name!r}: the experiment has none of this name; {did_you_mean(name, every)}")
