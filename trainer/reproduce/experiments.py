"""The paper's experiments and our own by name: their rows and settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shards.errors import ConfigError, did_you_mean
from trainer.reproduce.ablation import CHANGES, WITHOUT_TEST_SET

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


def _without_incv(stage: str, title: str, *also: str) -> Row:
    """A method that trains on all samples: INCV is not run for it. also: methods whose networks it reads."""
    return Row(stage, title, stage, (f"methods=[{', '.join([*also, stage])}]", "incv=null"), also=also)


_ALGORITHM_3 = ("methods=[coteaching_incv]",)
_METHODS = (
    _without_incv("standard", "Standard training"),
    _without_incv("forward_correction", "F-correction", "standard"),
    _without_incv("decoupling", "Decoupling"),
    _without_incv("coteaching", "Co-teaching"),
    _without_incv("mentornet", "MentorNet"),
    _without_incv("d2l", "D2L"),
    Row("coteaching_incv", "INCV + Co-teaching", "coteaching_incv", _ALGORITHM_3),
    Row(
        "coteaching_incv_plus",
        "INCV + Co-teaching, plus",
        "coteaching_incv",
        _ALGORITHM_3,
        "_plus",
        headline="ensemble",  # a part of plus; the paper's rows have the mean of both networks
    ),
)


def _rows(*names: str) -> tuple[Row, ...]:
    """Rows of Table 1, in its order."""
    return tuple(row for row in _METHODS if row.name in names)


_SETTINGS = (
    Setting("sym20", "symmetric 0.2", "cifar10_sym20"),
    Setting("sym50", "symmetric 0.5", "cifar10_sym50"),
    Setting("sym80", "symmetric 0.8", "cifar10_sym80"),
    Setting("asym40", "asymmetric 0.4", "cifar10_asym40"),
)
RECORDED_WITH = ("precision=bf16", "evaluation.every=1")
"""How all runs of Table 1 are made: fast, and with the test accuracy of every epoch."""

# Section 5.1: Algorithm 1 with ResNet-110, trained for 200 epochs so that it memorises the labels of its half.
_NCV = Row(
    "ncv",
    "Noisy cross-validation, ResNet-110",
    "incv",
    (
        "methods=[]",
        "model.name=cifar_resnet110",
        "incv.rounds=1",
        "incv.halves=1",  # "train the ResNet-110 on D1 and test on D2"
        "incv.epochs=200",
        "incv.round_network=last",
        "incv.remove_ratio=0.0",
        "incv.optimizer.milestones=[[80, 0.0001], [120, 0.00001], [160, 0.000001], [180, 0.0000005]]",
        "incv.optimizer.weight_decay=0.0",  # released code; the paper's text gives 1e-4 for all experiments
    ),
)


def _noise_ratios(kind: str, recipe: str, percents: Sequence[int]) -> tuple[Setting, ...]:
    """Settings of one kind of noise that override the ratio of a recipe."""
    short = {"symmetric": "sym", "asymmetric": "asym"}[kind]
    return tuple(
        Setting(
            f"{short}{each}", f"{kind} {each / 100:g}", recipe, (f"labels.ratio={each / 100:g}",), kind, each / 100
        )
        for each in percents
    )


_SYMMETRIC = _noise_ratios("symmetric", "cifar10_sym50", (10, 30, 50, 70, 80, 90, 100))
_ASYMMETRIC = _noise_ratios("asymmetric", "cifar10_asym40", (10, 20, 30, 40, 50))


def _settings_named(*names: str) -> tuple[Setting, ...]:
    return tuple(each for name in names for each in (*_SYMMETRIC, *_ASYMMETRIC) if each.name == name)


def _settings_with(suffix: str, overrides: tuple[str, ...], *names: str) -> tuple[Setting, ...]:
    """Settings of Table 1 with these overrides, compared with the same values of the paper; no names: all."""
    return tuple(
        replace(each, name=f"{each.name}_{suffix}", overrides=overrides, column=each.name)
        for each in _SETTINGS
        if not names or each.name in names
    )


_EPOCH_CHOSEN = ("data.eval_fraction=0.1", "evaluation.choose_on=held_out")
"""Hold out a tenth of the noisy labels, and use the epoch of each training that agrees with them best."""

_ABLATION = tuple(
    replace(row, headline="ensemble")
    for row in (
        _METHODS[-1],
        *(
            replace(_METHODS[-1], name=name, title=title, overrides=(*_ALGORITHM_3, *changes))
            for name, (title, changes) in CHANGES.items()
        ),
        _METHODS[-2],
    )
)
WEBVISION = (Setting("webvision50", "WebVision, 50 classes", "webvision50"),)


def _with_estimate(row: Row) -> Row:
    """The row with INCV, whose noise estimate the method reads where the true ratio is unknown."""
    return replace(row, overrides=tuple(each for each in row.overrides if each != "incv=null"))


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment("table1", "Table 1: test accuracy on CIFAR-10, ResNet-32", "accuracy", _METHODS, _SETTINGS),
        Experiment(
            "ablation",
            "Ablation: validation accuracy on CIFAR-10 without each part of plus, ResNet-32",
            "accuracy",
            _ABLATION,
            _settings_with("validation", WITHOUT_TEST_SET, "asym40"),  # it has most parts of plus
            seeds=(0,),
            evaluation_set="validation",
        ),
        Experiment(
            "f_correction",
            "F-correction with T from the epoch that agrees best with held-out labels, as its authors estimate it",
            "accuracy",
            _rows("standard", "forward_correction"),
            _settings_with("held_out", _EPOCH_CHOSEN),
            seeds=(0,),
            epoch="best epoch on held-out labels",
        ),
        Experiment(
            "decoupling_eval_first",
            "Decoupling that compares the networks in eval mode and trains on the rows that differ alone",
            "accuracy",
            _rows("decoupling"),
            _settings_with("eval_first", ("decoupling.compare=eval_first",)),
            seeds=(0,),
        ),
        Experiment(
            "without_coteaching",
            "What Co-teaching adds to INCV: standard training on the selected samples alone, ResNet-32",
            "accuracy",
            (
                *_rows("standard"),
                Row("standard_incv", "INCV + standard training", "standard_incv", ("methods=[standard_incv]",)),
                *_rows("coteaching_incv"),
            ),
            _SETTINGS,
            seeds=(0,),
        ),
        Experiment("figure1", "Figure 1: the noise transition matrix T", "nothing"),
        Experiment(
            "figure2",
            "Figure 2: accuracy, label precision and recall of noisy cross-validation against the theory",
            "rounds",
            (_NCV,),
            (*_SYMMETRIC, *_ASYMMETRIC),
            seeds=(0,),
        ),
        Experiment(
            "figure3",
            "Figure 3: the confusion matrix M of a network trained on noisy labels, and T",
            "confusion",
            (_NCV,),
            _settings_named("sym70"),
            seeds=(0,),
        ),
        Experiment(
            "figure4",
            "Figure 4: label precision and recall of INCV over its rounds",
            "rounds",
            _rows("coteaching_incv"),
            _SETTINGS,
        ),
        Experiment(
            "figure5",
            "Figure 5: the most suspicious labels of the original CIFAR-10",
            "suspects",
            (Row("incv", "INCV, one round", "incv", ("methods=[]", "incv.rounds=1")),),
            (Setting("original", "no noise added", "cifar10_sym20", ("labels={noise: none}",)),),
            seeds=(0,),
        ),
        Experiment(
            "figure6",
            "Figure 6: test accuracy on CIFAR-10 during training",
            "accuracy_per_epoch",
            _METHODS,
            _SETTINGS,
            seeds=(0,),
        ),
        Experiment(
            "figure7",
            "Figure 7: M and T at other noise settings",
            "confusion",
            (_NCV,),
            _settings_named("asym40", "sym80", "sym90", "sym100"),
            seeds=(0,),
        ),
        Experiment(
            "figure8",
            "Figure 8: the most suspicious labels of WebVision",
            "own_data",
            (Row("incv", "INCV", "incv", ("methods=[]",)),),
            WEBVISION,
            seeds=(0,),
        ),
        Experiment(
            "table2",
            "Table 2: validation accuracy on WebVision and ILSVRC12, Inception-ResNet-v2",
            "own_data",
            tuple(_with_estimate(row) if row.name == "coteaching" else row for row in _METHODS[:-1]),
            WEBVISION,
            seeds=(0,),
        ),
    )
}


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
