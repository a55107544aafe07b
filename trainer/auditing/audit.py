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
from trainer.auditing.folder import NO_OPTIONS, describe_classes, find_images
from trainer.auditing.network import choose_network
from trainer.auditing.result import AuditResult
from trainer.auditing.settings import Start, choose_recipe
from trainer.config.recipe_file import apply_override
from trainer.config.schema import ExecutionConfig, Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import select_device
from trainer.distributed.stop import EXIT_STOPPED
from trainer.estimate.table import describe_time, estimate_cpu_seconds
from trainer.records.run_directory import RunDirectory
from trainer.run.preflight import check_without_data
from trainer.run.recipe import check_recipe
from trainer.run.runner import run_recipe

_log = logging.getLogger(__name__)
_LONG = 30 * 60  # seconds after which an audit on a CPU also says how to shorten it
_SOURCE_KEYS = {f"data.train.{each.name}": f"--{each.name.replace('_', '-')}" for each in fields(SourceOptions)}
_IMAGE_KEYS = ("data.train.source", "data.train.root", "data.train.split", *_SOURCE_KEYS)
OPTIONS = {
    "root": None,
    "data.train.root": None,
    "model.weights": "--weights",
    "model.name": "--model",
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
    folder: str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    partial: bool = False,
    allow_outside: bool = False,
    weights: str | os.PathLike[str] | None = None,
    model: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    train: bool = False,
    overrides: Sequence[str] = (),
) -> AuditResult:
    """Audit the labels of an image folder; returns the list of all samples, most suspicious first, and the verdict.

    The run directory (default: runs/audit-FOLDER) also gets the report; an audit that was stopped resumes when called
    again. Raises InputError for unusable images or options, and CommandStopped if the run is stopped by a signal.
    """
    options = AuditOptions(
        Path(folder),
        source=SourceOptions(
            os.fspath(csv) if csv is not None else None, path_column, label_column, partial, allow_outside
        ),
        weights=_path(weights),
        model=model,
        run_dir=_path(run_dir),
        download=download,
        train=train,
        overrides=overrides,
    )
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
    found = find_images(options.folder, options.source)
    samples, classes = found.samples, found.classes
    device = select_device(ExecutionConfig()).type

    def choose(start: Start) -> dict[str, Any]:
        content = choose_recipe(found.data, samples, start, device, os.cpu_count() or 1, options.train)
        content["execution"]["features"] = os.path.abspath(RunDirectory(options.run).features)
        for override in options.overrides:
            apply_override(content, override)
        return content

    def measure(start: Start) -> float:
        return estimate_cpu_seconds(check_recipe(choose(start), "the recipe of the audit"), samples, classes)

    start = _choose_start(options, Duration(device, samples, measure))
    recipe = check_recipe(choose(start), "the recipe of the audit", options.overrides)
    _require_outside(options.folder, options.run, Path(recipe.data.train.shards))
    _log.info("audit: classes: %s", describe_classes(found.counts))
    if single := [name for name, count in found.counts.items() if count == 1]:
        _log.warning(
            "only one image in %s: its label cannot be judged, and the folder may be no class", list_some(single)
        )
    _log.info("audit: %s", describe_choice(start, samples, classes, recipe))
    if not start.has_weights:
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


def _require_outside(folder: Path, run: Path, shards: Path) -> None:
    """Raise ConfigError if the audit would write into the folder, where the next audit would take it for a class."""
    root = folder.resolve()
    inside = [str(place) for place in (run, shards) if place.resolve().is_relative_to(root)]
    if inside:
        raise ConfigError(
            f"the audit would write {' and '.join(inside)} into {folder}, among the images: choose another --run-dir "
            f"or start it elsewhere: `cd {shlex.quote(str(root.parent))} && incv audit {shlex.quote(root.name)}`"
        )


def _announce_time(recipe: Recipe, samples: int, classes: int) -> None:
    """On a CPU, say how long the audit will take; a network that cannot be built is left to the checks of the run."""
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
    if recipe.incv.judge == "features":
        return f"{what}; one pass for its features, {recipe.incv.folds} folds of a logistic regression"
    trained = ", only its classifier is trained" if recipe.model.trainable == "classifier" else ""
    return f"{what}{trained}; batch {recipe.batch.global_}, {recipe.incv.epochs} epochs per fold"
