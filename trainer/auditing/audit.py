"""Runs an audit: finds the images of a folder, writes a recipe for them, and runs INCV alone."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from shards.durable import read_parquet, write_bytes
from shards.errors import CommandStopped, ConfigError, DataError
from shards.sources import open_source
from trainer.auditing.network import choose_network
from trainer.auditing.settings import Start, choose_recipe
from trainer.config.schema import ExecutionConfig, Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import select_device
from trainer.distributed.stop import EXIT_STOPPED
from trainer.records.run_directory import RunDirectory
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

_log = logging.getLogger(__name__)
_HEADER = """# Chosen by `incv audit {folder}` for {samples:,} images of {classes:,} classes.
# To change it, copy it and run the copy: incv run -c COPY.yaml
"""
_MIN_SAMPLES = 20


@dataclass(frozen=True)
class AuditOptions:
    """What the user may choose; everything else is chosen for the data and the machine."""

    folder: Path
    weights: Path | None = None
    model: str | None = None
    run_dir: Path | None = None
    download: bool = True
    """Whether pretrained weights may be downloaded."""
    redo: Sequence[str] = ()
    overrides: Sequence[str] = ()
    """Recipe keys, as on the command line of `incv run`."""

    @property
    def run(self) -> Path:
        return self.run_dir or Path("runs") / f"audit-{self.folder.resolve().name or 'root'}"


def run_audit(options: AuditOptions) -> int:
    """Run an audit, or resume it; returns the exit code of the run."""
    path, recipe = prepare_audit(options)
    return run_recipe(recipe, path.stem, options.run, options.redo)


def audit(
    folder: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    model: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    overrides: Sequence[str] = (),
) -> pa.Table:
    """Audit the labels of an image folder; returns the list of all samples, most suspicious first.

    The columns are those of labels_review.parquet (docs/running.md). The run directory (default: runs/audit-FOLDER)
    also gets the report; an audit that was stopped resumes when called again. Raises InputError for unusable images
    or options, and CommandStopped if the run is stopped by a signal.
    """
    options = AuditOptions(
        Path(folder),
        Path(weights) if weights is not None else None,
        model,
        Path(run_dir) if run_dir is not None else None,
        download,
        overrides=overrides,
    )
    code = run_audit(options)
    if code == EXIT_STOPPED:
        raise CommandStopped(f"the audit in {options.run} was stopped; call it again to resume")
    return read_parquet(RunDirectory(options.run).labels_review_parquet, "list of labels to review")


def prepare_audit(options: AuditOptions) -> tuple[Path, Recipe]:
    """Choose the recipe of an audit and write it beside the run directory; returns its path and the recipe."""
    if detect_launch().size > 1:
        raise ConfigError(
            "`incv audit` runs in one process: start it without a launcher, then use the recipe that it writes with "
            "`incv run` on many"
        )
    data, samples, classes = find_images(options.folder)
    device = select_device(ExecutionConfig()).type
    start = choose_network(options.model, options.weights, device, options.download)
    content = choose_recipe(data, samples, start, device, workers=os.cpu_count() or 1)
    content["data"]["train"]["shards"] = str(options.run.with_name(f"{options.run.name}-shards"))
    path = options.run.with_name(f"{options.run.name}.yaml")
    header = _HEADER.format(folder=options.folder, samples=samples, classes=classes)
    text = header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    write_bytes(path, text.encode())
    recipe = load_recipe(path, options.overrides)
    _log.info("audit: %s", describe_choice(start, samples, classes, recipe))
    return path, recipe


def find_images(folder: Path) -> tuple[dict[str, Any], int, int]:
    """Return the recipe's section `data.train` for a folder, and its numbers of images and classes."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder that contains one folder of images per class")
    root = folder.resolve()
    inner = [entry for entry in sorted(root.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]
    split = "train" if (root / "train") in inner and any(e.is_dir() for e in (root / "train").iterdir()) else ""
    source = open_source("image_folder", root, split)
    samples, classes = len(source), len(source.class_names)
    if classes < 2:
        raise DataError(
            f"{folder} has images of one class only ({source.class_names[0]}): an audit compares classes, so it "
            "needs at least two class folders"
        )
    if samples < _MIN_SAMPLES:
        raise DataError(
            f"{folder} has {samples} images: an audit needs at least {_MIN_SAMPLES}, and works with hundreds"
        )
    return {"source": "image_folder", "split": split, "root": str(root)}, samples, classes


def describe_choice(start: Start, samples: int, classes: int, recipe: Recipe) -> str:
    """Return the chosen settings in one line, with a warning if the network has no pretrained weights."""
    assert recipe.incv is not None
    origin = f"from {start.weights}" if start.weights else "pretrained" if start.pretrained else "from scratch"
    words = (
        f"{samples:,} images, {classes:,} classes; {start.model} {origin} at {recipe.image.size} pixels, batch "
        f"{recipe.batch.global_}, {recipe.incv.epochs} epochs per fold"
    )
    if start.has_weights:
        return words
    return (
        f"{words}. No pretrained weights: neither the cache of the Hugging Face hub nor --weights has any. Training "
        "from scratch needs thousands of images; with fewer, expect a poor list"
    )
