"""The stages of a run: one record each, in the order in which they run. Adding a stage means adding its record.

The ledger, the stage loop, the dry run, the estimate, the report and the comparison iterate over these records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shards.errors import ConfigError
from trainer.config.fitting import count_steps, fit_section
from trainer.config.schema import Recipe, TrainingConfig
from trainer.incv import NUMERICS as INCV_NUMERICS
from trainer.methods import WEIGHTS_NUMERICS
from trainer.methods.registry import get_method, method_names
from trainer.records.run_directory import RunDirectory
from trainer.run.result_keys import Keys, result_keys, select_keys

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from trainer.methods.method import Method

_NETWORK_KEYS = ("model", "image", "batch", "order", "precision")


@dataclass(frozen=True)
class DataSizes:
    """What a dry run knows about the data."""

    trained: int | None
    """Number of samples to train on; None if unknown until packed."""
    unpacked: Sequence[str] = ()
    """The splits that are not packed yet."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what it reads and writes, and the code that runs, describes and estimates it.

    Code that needs torch is named as `module:attribute`, so that listing stages does not import it.
    """

    name: str
    """Its name on the command line, in the manifest and in the report."""
    run: str | None
    """Called on all ranks with (StageRunner, stage name); may be a generator that yields after every training step.
    None: the stage is done before the others, when the data are opened."""
    inputs: Callable[[Recipe], Sequence[str]]
    """Returns the stages whose files it reads."""
    applies: Callable[[Recipe], bool] = lambda recipe: True
    """Whether a recipe has this stage."""
    reads: Callable[[Recipe], Sequence[str]] = lambda recipe: ()
    """Returns prefixes of the result keys that it reads, besides those of its inputs."""
    outputs: Callable[[RunDirectory], Sequence[Path]] = lambda run: ()
    """Returns all files and folders that it writes."""
    required_outputs: Callable[[RunDirectory], Sequence[Path]] = lambda run: ()
    """Returns the outputs without which it is not done."""
    numerics: Callable[[], int] | None = None
    """Returns the version of its numbers; None: it trains nothing."""
    describe: Callable[[Recipe, DataSizes], str] = lambda recipe, sizes: ""
    """Returns what it will do, for the dry run."""
    estimate: str | None = None
    """Called with (CostModel, stage name, GPUs); returns its phases. None: its time is not estimated."""
    on_rank0: bool = False
    """Whether it runs on rank 0 alone, while the other ranks wait."""
    is_repeated: bool = False
    """Whether every start runs it again."""


def _describe_packing(recipe: Recipe, sizes: DataSizes) -> str:
    return f"pack {', '.join(sizes.unpacked)}" if sizes.unpacked else "all shards exist"


def _describe_labels(recipe: Recipe, sizes: DataSizes) -> str:
    config = recipe.labels
    ratio = f" {config.ratio:g}" if config.noise in ("symmetric", "asymmetric") else ""
    labels = f"file {config.file}" if config.file else f"noise {config.noise}{ratio}"
    return labels + (f", corrections {config.corrections}" if config.corrections else "")


def _judges_features(recipe: Recipe) -> bool:
    return recipe.incv is not None and recipe.incv.judge == "features"


def _features_read(recipe: Recipe) -> tuple[str, ...]:
    against = None if recipe.incv is None else recipe.incv.against
    compared = () if against is None else ("incv.against", f"data.eval.{against}")
    return ("model", "image", "precision", "incv.features_file_checksum", *compared)


def _describe_incv(recipe: Recipe, sizes: DataSizes) -> str:
    from trainer.incv.noise_estimates import uses_best_epoch  # deferred: it imports torch

    incv = recipe.incv
    assert incv is not None
    if incv.predictions_file is not None:
        return f"the predictions of {incv.predictions_file}, calibrated"
    if incv.judge == "features":
        return f"{incv.folds} folds of a logistic regression on features, and a vote of neighbours"
    each_epoch = uses_best_epoch(incv, 0, None)
    extra = ", a predict pass after each epoch to find the best one" if each_epoch else ""
    trained = None if sizes.trained is None else incv.largest_fold(sizes.trained)
    length = _describe_length(trained, recipe.batch.rows, incv)
    if incv.halves == 1:
        return f"1 fold, {length}{extra}"
    return f"{incv.rounds} rounds of {incv.folds} folds, {length} per fold in round 1{extra}"


def _describe_training(method: "Method", recipe: Recipe, sizes: DataSizes) -> str:
    networks = "1 network" if method.networks == 1 else f"{method.networks} networks"
    most = "at most " if method.reads_selection(recipe) and sizes.trained is not None else ""
    return f"{networks}, {_describe_length(sizes.trained, recipe.batch.rows, method.config(recipe), most)}"


def _describe_length(samples: int | None, batch: int, section: TrainingConfig, most: str = "") -> str:
    """Describe the epochs and steps of a training on `samples`."""
    if samples is None:
        return f"{section.epochs} epochs, number of steps unknown until packed"
    per_epoch = count_steps(samples, batch)
    epochs = fit_section(section, per_epoch).epochs
    return f"{epochs} epochs, {most}{per_epoch * epochs:,} steps"


def _method_inputs(method: "Method", recipe: Recipe) -> list[str]:
    if method.reads_selection(recipe):
        return ["incv", *method.reads_methods(recipe)]
    return ["labels", *(["incv"] if method.reads_incv(recipe) else []), *method.reads_methods(recipe)]


def _method_reads(method: str, recipe: Recipe) -> tuple[str, ...]:
    chosen_on = recipe.evaluation.choose_on
    return (*_NETWORK_KEYS, "evaluation", method, *([f"data.eval.{chosen_on}"] if chosen_on else []))


def _method_stage(name: str) -> Stage:
    """Return the stage of a training method. The method itself is imported only when its recipe is read."""
    return Stage(
        name=name,
        run="trainer.run.stages:StageRunner.train",
        inputs=lambda recipe: _method_inputs(get_method(name), recipe),
        applies=lambda recipe: name in recipe.methods,
        reads=lambda recipe: _method_reads(name, recipe),
        outputs=lambda run: (run.method(name),),
        required_outputs=lambda run: (run.method(name),),
        numerics=lambda: get_method(name).numerics,
        describe=lambda recipe, sizes: _describe_training(get_method(name), recipe, sizes),
        estimate="trainer.estimate.cost:CostModel.cost_method",
    )


STAGES: list[Stage | Callable[[], Sequence[Stage]]] = [
    Stage(
        name="pack",
        run=None,
        inputs=lambda recipe: (),
        describe=_describe_packing,
        is_repeated=True,  # only verifies existing shards
    ),
    Stage(
        name="labels",
        run="trainer.run.labels:write_label_files",
        inputs=lambda recipe: ("pack",),
        reads=lambda recipe: ("seed", "labels", "data.train", "data.eval_fraction"),
        outputs=lambda run: (run.labels, run.true_labels, run.corrections),
        required_outputs=lambda run: (run.labels,),
        describe=_describe_labels,
        on_rank0=True,
    ),
    Stage(
        name="features",
        run="trainer.run.examination:examine",
        inputs=lambda recipe: ("labels",),
        applies=_judges_features,
        reads=_features_read,
        outputs=lambda run: (run.examination, run.examination_facts, run.neighbours),
        required_outputs=lambda run: (run.examination, run.neighbours),
        describe=lambda recipe, sizes: "one pass over the images; neighbours, duplicates and bad pictures",
        estimate="trainer.estimate.cost:CostModel.cost_features",
    ),
    Stage(
        name="incv",
        run="trainer.run.stages:StageRunner.run_incv",
        inputs=lambda recipe: ("features",) if _judges_features(recipe) else ("labels",),
        applies=lambda recipe: recipe.incv is not None,
        reads=lambda recipe: (*_NETWORK_KEYS, "incv"),
        outputs=lambda run: (
            *(run.rounds, run.selection, run.incv, run.judge_facts, run.probabilities),
            *(run.probabilities_table, run.labels_review_csv, run.labels_review_parquet),
        ),
        required_outputs=lambda run: (run.selection, run.incv),
        numerics=lambda: INCV_NUMERICS,
        describe=_describe_incv,
        estimate="trainer.estimate.cost:CostModel.cost_incv",
    ),
    Stage(
        name="classifier",
        run="trainer.run.feature_classifier:fit_classifier",
        inputs=lambda recipe: ("incv",),
        applies=lambda recipe: _judges_features(recipe) and recipe.model.has_initial_weights,
        outputs=lambda run: (run.classifier,),
        required_outputs=lambda run: (run.classifier,),
        describe=lambda recipe, sizes: "a logistic regression on the selected samples, for `incv predict`",
        on_rank0=True,
    ),
    lambda: [_method_stage(name) for name in method_names()],
    Stage(
        name="evaluate",
        run="trainer.run.stages:StageRunner.evaluate",
        inputs=lambda recipe: recipe.methods,
        applies=lambda recipe: bool((recipe.data.eval or recipe.data.eval_fraction) and recipe.methods),
        reads=lambda recipe: ("methods", "data.eval"),
        outputs=lambda run: (run.evaluation, run.evaluation_progress),
        required_outputs=lambda run: (run.evaluation,),
        describe=lambda recipe, sizes: (
            f"{len(recipe.methods)} method(s) on {', '.join(recipe.data.evaluation_names())}"
        ),
        estimate="trainer.estimate.cost:CostModel.cost_evaluation",
    ),
    Stage(
        name="export",
        run="trainer.run.export:export_networks",
        inputs=lambda recipe: recipe.methods,
        applies=lambda recipe: bool(recipe.methods),
        reads=lambda recipe: ("methods",),
        outputs=lambda run: sorted(run.methods.glob("*/export")),
        on_rank0=True,
    ),
    Stage(
        name="report",
        run="trainer.run.run_report:report_run",
        inputs=lambda recipe: [name for name in stages_of(recipe) if name not in ("pack", "export", "report")],
        outputs=lambda run: (run.report_json, run.report_html),
        on_rank0=True,
        is_repeated=True,  # takes a second
    ),
]
"""All stages in order; a function stands for as many stages as it returns."""


def list_stages() -> list[Stage]:
    """Return the records of all stages, in order."""
    return [stage for each in STAGES for stage in ((each,) if isinstance(each, Stage) else each())]


def find_stage(name: str) -> Stage:
    return next(stage for stage in list_stages() if stage.name == name)


def all_stages() -> tuple[str, ...]:
    """Return the names of all stages, in order."""
    return tuple(stage.name for stage in list_stages())


def stages_of(recipe: Recipe) -> list[str]:
    """Return the names of the stages of this recipe, in order."""
    return [stage.name for stage in list_stages() if stage.applies(recipe)]


def require_stages(redo: Sequence[str], only: str | None, recipe: Recipe) -> None:
    """Raise ConfigError if `redo` or `only` names a stage that this recipe does not have."""
    own = stages_of(recipe)[1:]
    named = {f"--redo {stage}": stage for stage in redo if stage != "pack"} | ({f"incv {only}": only} if only else {})
    for words, stage in named.items():
        if stage not in own:
            raise ConfigError(
                f"`{words}`: this recipe has no such stage; its stages are {', '.join(own)} "
                "(only the training methods listed under `methods`)"
            )


def stage_keys(recipe: Recipe, facts: Keys) -> dict[str, Keys]:
    """Return, for each stage, the result keys that it and its inputs read.

    facts: checksums that represent files among the keys, such as `data.train.checksum`.
    """
    every = {**result_keys(recipe), **facts}
    keys: dict[str, Keys] = {}
    for name in stages_of(recipe):
        stage, merged = find_stage(name), Keys()
        for needed in stage.inputs(recipe):
            merged.update(keys.get(needed, {}))
        keys[name] = merged | select_keys(every, stage.reads(recipe))
    return keys


def numerics_of(stage: str, recipe: Recipe) -> int | None:
    """Return the version of a stage's numbers; None for a stage that trains nothing."""
    numerics = find_stage(stage).numerics
    return None if numerics is None else numerics() + WEIGHTS_NUMERICS * recipe.model.has_initial_weights


def numerics_behind(stage: str, recipe: Recipe) -> dict[str, int]:
    """Return the versions of the numbers of a stage and of all stages that it builds on."""
    found: dict[str, int] = {}
    for needed in find_stage(stage).inputs(recipe):
        found |= numerics_behind(needed, recipe)
    version = numerics_of(stage, recipe)
    return found if version is None else found | {stage: version}
