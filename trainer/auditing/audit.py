"""Runs an audit: finds the images of a folder, writes a recipe for them, and runs INCV alone."""

import logging
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from shards.errors import CommandStopped, ConfigError, InputError, list_some, renamed_fields
from shards.sources import SourceOptions
from trainer.auditing.duration import Duration
from trainer.auditing.folder import NO_OPTIONS, describe_classes, find_images, find_other_images
from trainer.auditing.given_data import is_folder, read_given, write_embeddings, write_given, write_predictions
from trainer.auditing.network import choose_network
from trainer.auditing.result import AuditResult
from trainer.auditing.settings import Start, choose_recipe
from trainer.config.recipe_file import apply_override
from trainer.config.schema import NO_NETWORK, ExecutionConfig, Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import select_device
from trainer.distributed.stop import EXIT_STOPPED
from trainer.estimate.table import describe_time, estimate_cpu_seconds
from trainer.records.logs import show_progress
from trainer.records.run_directory import RunDirectory
from trainer.run.given_arrays import given_checksum
from trainer.run.preflight import check_without_data
from trainer.run.recipe import check_recipe
from trainer.run.runner import run_recipe

_log = logging.getLogger(__name__)
_LONG = 30 * 60  # seconds after which an audit on a CPU also says how to shorten it
_SOURCE_KEYS = {f"data.train.{each.name}": f"--{each.name.replace('_', '-')}" for each in fields(SourceOptions)}
_IMAGE_KEYS = ("data.train.source", "data.train.root", "data.train.split", *_SOURCE_KEYS)
AGAINST = "test"
"""Name of the evaluation set of --against."""
_NO_NETWORK_SIZE = 128
"""Side of the images of which thumbnails are made if no network is run."""
_FILES = {"embeddings": "features_file", "predictions": "predictions_file"}
"""The key of the section `incv` that each option sets."""
OPTIONS = {
    "root": None,
    "data.train.root": None,
    "model.weights": "--weights",
    "model.name": "--model",
    "incv.features_file": "--embeddings",
    "incv.predictions_file": "--predictions",
    "data.eval.test.root": "--against",
    **_SOURCE_KEYS,
}
"""What sets a recipe key in an audit. The root is FOLDER, which errors name by its path."""


@dataclass(frozen=True)
class AuditOptions:
    """What the user may choose; everything else is chosen for the data and the machine."""

    folder: Path
    source: SourceOptions = NO_OPTIONS
    """Where the labels are, if not in the names of folders, and which images count."""
    weights: Path | None = None
    model: str | None = None
    run_dir: Path | None = None
    embeddings: Path | None = None
    """A file of features, so that no network is run."""
    predictions: Path | None = None
    """A file of held-out probabilities, which judge the labels."""
    against: Path | None = None
    """Another folder, such as a test set, in which images of this one are looked for."""
    download: bool | None = True
    """Whether pretrained weights may be downloaded; None: with consent, on a terminal."""
    train: bool = False
    """Whether networks are trained in spite of pretrained weights, whose features would do in minutes."""
    redo: Sequence[str] = ()
    overrides: Sequence[str] = ()
    """Recipe keys, as on the command line of `incv run`."""

    @property
    def run(self) -> Path:
        return self.run_dir or Path("runs") / f"audit-{Path(os.path.abspath(self.folder)).name or 'root'}"


def run_audit(options: AuditOptions) -> int:
    """Run an audit, or resume it; returns the exit code of the run. An audit that is refused writes nothing."""
    with renamed_fields(OPTIONS):
        return run_recipe(prepare_audit(options), options.run.name, options.run, options.redo)


def audit(
    data: Any,
    *,
    csv: str | os.PathLike[str] | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    partial: bool = False,
    allow_outside: bool = False,
    weights: str | os.PathLike[str] | None = None,
    model: str | None = None,
    embeddings: Any = None,
    predictions: Any = None,
    against: str | os.PathLike[str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    train: bool = False,
    redo: Sequence[str] = (),
    overrides: Sequence[str] = (),
    progress: bool = True,
) -> AuditResult:
    """Audit the labels of images; return the list of all samples, most suspicious first, and the verdict.

    An audit that was stopped resumes when it is called again.

    Args:
        data: a folder; a Hugging Face Dataset with a column of images and one of labels; or a pair (images, labels),
            where images are uint8 [n, height, width, 3] or a list of such arrays or PIL images, and labels are whole
            numbers or texts. Data in memory are written once, as files in the run directory.
        csv: of a folder, a file with the paths and labels of its images.
        path_column: of the CSV file or the Dataset, the column of the images, if it is not recognised.
        label_column: likewise, the column of the labels.
        partial: ignore images of the folder that the CSV file does not list.
        allow_outside: accept paths and links that leave the folder.
        weights: file of pretrained weights; default: timm's, from the hub or its cache.
        model: name of a timm network; default: chosen for this machine.
        embeddings: features of the images, so that no network is run: an array [images, features], or a .npy or
            .parquet file. Rows are in the order of the data (of a folder: classes, then paths), unless a .parquet
            file has a column `key`.
        predictions: held-out probabilities, which then judge the labels: an array [images, classes], or such a file.
            Columns are in the order of the classes, or of a .parquet file named by them.
        against: another folder, such as a test set; images that are in both are listed.
        run_dir: where to write; default: runs/audit-FOLDER, or for data in memory runs/audit-HASH.
        download: whether pretrained weights may be downloaded.
        train: train a network in each fold, which takes hours, instead of using features.
        redo: stages to run again, such as `features` after the embeddings have changed.
        overrides: recipe keys, such as `image.size=224`.
        progress: print what the command prints on stderr; False: nothing.

    Raises:
        InputError: the images or options cannot be used.
        CommandStopped: a signal stopped the run.
    """
    with show_progress(progress), renamed_fields(OPTIONS):
        options = AuditOptions(
            Path(),
            weights=_path(weights),
            model=model,
            against=_path(against),
            run_dir=_path(run_dir),
            download=download,
            train=train,
            redo=redo,
            overrides=overrides,
        )
        given = None
        if is_folder(data):
            listed = os.fspath(csv) if csv is not None else None
            source = SourceOptions(listed, path_column, label_column, partial, allow_outside)
            options = replace(options, folder=Path(data), source=source)
        else:
            given = read_given(data, path_column, label_column)
            run, folder, labels = write_given(given, options.run_dir)
            options = replace(options, folder=folder, source=SourceOptions(str(labels)), run_dir=run)
        if embeddings is not None and not is_folder(embeddings):
            embeddings = write_embeddings(embeddings, options.run)
        if predictions is not None and not is_folder(predictions):
            predictions = write_predictions(predictions, options.run, given)
        options = replace(options, embeddings=_path(embeddings), predictions=_path(predictions))
        code = run_audit(options)
    if code == EXIT_STOPPED:
        raise CommandStopped(f"the audit in {options.run} was stopped; call it again to resume")
    return AuditResult.read(options.run)


def _path(given: str | os.PathLike[str] | None) -> Path | None:
    return Path(given) if given is not None else None


def prepare_audit(options: AuditOptions) -> Recipe:
    """Choose the recipe of an audit and apply the overrides."""
    if detect_launch().size > 1:
        raise ConfigError(
            "`incv audit` runs in one process: start it without a launcher, then use its config.resolved.yaml "
            "with `incv run` on many"
        )
    _check_overrides(options.overrides)
    options = _with_recorded_files(options)
    _check_files(options)
    found = find_images(options.folder, options.source)
    against = None if options.against is None else find_other_images(options.against, options.folder, options.source)
    samples, classes = found.samples, found.classes
    device = select_device(ExecutionConfig()).type

    def choose(start: Start) -> dict[str, Any]:
        content = choose_recipe(found.data, samples, start, device, os.cpu_count() or 1, options.train)
        content["execution"]["features"] = os.path.abspath(RunDirectory(options.run).features)
        content["incv"] |= _file_keys(options)
        if against is not None:
            content["data"]["eval"] = {AGAINST: against | {"resize": content["data"]["train"]["resize"]}}
            content["incv"]["against"] = AGAINST
        for override in options.overrides:
            apply_override(content, override)
        return content

    def measure(start: Start) -> float:
        return estimate_cpu_seconds(check_recipe(choose(start), "the recipe of the audit"), samples, classes)

    start = _choose_start(options, Duration(device, samples, measure))
    recipe = check_recipe(choose(start), "the recipe of the audit", options.overrides)
    for folder in filter(None, (options.folder, options.against)):
        _require_outside(folder, options.run, *(Path(split.shards) for split in recipe.data.splits().values()))
    _log.info("audit: classes: %s", describe_classes(found.counts))
    if single := [name for name, count in found.counts.items() if count == 1]:
        _log.warning(
            "only one image in %s: its label cannot be judged, and the folder may be no class", list_some(single)
        )
    _log.info("audit: %s", describe_choice(start, samples, classes, recipe))
    if not start.has_weights and start.model != NO_NETWORK:
        _log.warning(
            "no pretrained weights: %s. Training from scratch needs thousands of images; with fewer, expect a poor "
            "list. Or name a file: --weights FILE --model NAME",
            start.why_no_weights,
        )
    if not RunDirectory(options.run).manifest.exists():
        check_without_data(recipe)  # before the time is measured, which may take a while
        _announce_time(recipe, samples, classes)
    return recipe


def _choose_start(options: AuditOptions, in_time: Duration) -> Start:
    """Return the network that the options name, that with which the audit began, or the one to begin with."""
    model, weights = options.model, options.weights
    without_network = Start(NO_NETWORK, image={"size": _NO_NETWORK_SIZE})
    if options.embeddings is not None or (options.predictions is not None and model is None and weights is None):
        return without_network
    start = _choose_network(options, in_time)
    return without_network if options.predictions is not None and not start.has_weights else start


def _choose_network(options: AuditOptions, in_time: Duration) -> Start:
    model, weights = options.model, options.weights
    run, size = RunDirectory(options.run), _read_size(options)
    recorded = _read_recorded(run, "model") if model is None and weights is None else {}
    if "name" not in recorded:
        return choose_network(model, weights, size, in_time, options.download)
    _log.info("audit: resumes with the network of %s", options.run)
    model, weights = recorded["name"], _path(recorded.get("weights"))
    if weights is None and not recorded.get("pretrained"):
        image = {} if size is None else {"size": size}
        return Start(recorded["name"], image=image, why_no_weights="this audit began without any")
    start = choose_network(model, weights, size, in_time, options.download)
    return replace(start, options=recorded.get("options") or {})


def _with_recorded_files(options: AuditOptions) -> AuditOptions:
    """Return the options with the files with which the audit began, unless other ones or a network are named."""
    if options.against is None:
        root = _read_recorded(RunDirectory(options.run), "data").get("eval", {}).get(AGAINST, {}).get("root")
        options = replace(options, against=_path(root))
    named = (options.embeddings, options.predictions, options.weights, options.model)
    if any(each is not None for each in named):
        return options
    recorded = _read_recorded(RunDirectory(options.run), "incv")
    files = {name: recorded.get(key) for name, key in _FILES.items()}
    if any(files.values()):
        _log.info("audit: resumes with %s", ", ".join(str(path) for path in files.values() if path))
    return replace(options, embeddings=_path(files["embeddings"]), predictions=_path(files["predictions"]))


def _check_files(options: AuditOptions) -> None:
    """Raise InputError for files that cannot be read, or that exclude other options."""
    if options.embeddings is not None and (options.weights is not None or options.model is not None):
        raise ConfigError("--embeddings takes the place of a network: leave out --weights and --model")
    if options.train and any((options.embeddings, options.predictions, options.against)):
        raise ConfigError("--embeddings, --predictions and --against need features instead of --train: leave it out")
    for name, key in _FILES.items():
        if (path := getattr(options, name)) is not None:
            given_checksum(f"incv.{key}", path)


def _file_keys(options: AuditOptions) -> dict[str, str]:
    """Return the keys of the section `incv` that name the files of the user."""
    named = {key: getattr(options, name) for name, key in _FILES.items()}
    return {key: os.path.abspath(path) for key, path in named.items() if path is not None}


def _read_size(options: AuditOptions) -> int | None:
    """Return the size that `image.size=PIXELS` gives, or with which this audit began; None if there is neither."""
    given = [value for key, _, value in (each.partition("=") for each in options.overrides) if key == "image.size"]
    if given and given[-1].isdecimal():
        return int(given[-1])
    size: int | None = _read_recorded(RunDirectory(options.run), "image").get("size")
    return size


def _read_recorded(run: RunDirectory, name: str) -> dict[str, Any]:
    """Return a section of the recipe of an audit that has begun; empty if it has not, or if its recipe is damaged."""
    if run.manifest.exists():
        with suppress(OSError, yaml.YAMLError, AttributeError, KeyError):
            section: dict[str, Any] = yaml.safe_load(run.config.read_text())[name]
            return section if isinstance(section, dict) else {}
    return {}


def _require_outside(folder: Path, *outputs: Path) -> None:
    """Raise ConfigError if the audit would write into the folder, where the next audit would take it for a class."""
    root = folder.resolve()
    inside = [str(place) for place in outputs if place.resolve().is_relative_to(root)]
    if inside:
        raise ConfigError(
            f"the audit would write {' and '.join(inside)} into {folder}, among the images: choose another --run-dir "
            f"or start it elsewhere: `cd {shlex.quote(str(root.parent))} && incv audit {shlex.quote(root.name)}`"
        )


def _announce_time(recipe: Recipe, samples: int, classes: int) -> None:
    """On a CPU, say how long the audit will take; a network that cannot be built is left to the checks of the run."""
    if recipe.model.is_none:
        return
    with suppress(InputError):
        if select_device(recipe.execution).type == "cpu":
            seconds = estimate_cpu_seconds(recipe, samples, classes)
            _log.info("audit: expected to take %s on this CPU", describe_time(seconds))
            if seconds > _LONG:
                _log.info(
                    "audit: to shorten it, use a machine with a GPU, or press Ctrl-C and start it again with "
                    "`--redo incv` and a smaller network (such as --model cifar_resnet20) or smaller images "
                    "(image.size=PIXELS)"
                )


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a second folder, and for a key that FOLDER or an option sets."""
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise ConfigError(
                f"{override!r} is neither an option nor KEY=VALUE: an audit takes one folder, the one that contains "
                "the folders of all classes"
            )
        if key in _IMAGE_KEYS:
            raise ConfigError(
                f"{override!r}: an audit takes its images from FOLDER, --csv, --path-column, --label-column, "
                "--partial and --allow-outside: use these, or `incv run` with a recipe of your own"
            )


def describe_choice(start: Start, samples: int, classes: int, recipe: Recipe) -> str:
    """Return the chosen settings in one line."""
    assert recipe.incv is not None
    origin = f"from {start.weights}" if start.weights else "pretrained" if start.pretrained else "from scratch"
    what = f"{samples:,} images, {classes:,} classes; {start.model} {origin} at {recipe.image.size} pixels"
    if recipe.incv.has_files:
        files = [path for path in (recipe.incv.features_file, recipe.incv.predictions_file) if path]
        network = "" if recipe.model.is_none else f"; {start.model} {origin}"
        return f"{samples:,} images, {classes:,} classes{network}; {' and '.join(files)}"
    if recipe.incv.judge == "features":
        return f"{what}; one pass for its features, {recipe.incv.folds} folds of a logistic regression"
    trained = ", only its classifier is trained" if recipe.model.trainable == "classifier" else ""
    return f"{what}{trained}; batch {recipe.batch.global_}, {recipe.incv.epochs} epochs per fold"
