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
from shards.sources.source import SourceOptions
from trainer.auditing.network import choose_network
from trainer.auditing.settings import Start, choose_recipe
from trainer.config.recipe_file import apply_override
from trainer.config.schema import ExecutionConfig, Recipe
from trainer.distributed.launch import detect_launch
from trainer.distributed.process_group import select_device
from trainer.distributed.stop import EXIT_STOPPED
from trainer.records.run_directory import RunDirectory
from trainer.run.data_sets import require_two_classes
from trainer.run.recipe import check_recipe
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
    csv: Path | None = None
    """A CSV file of paths and labels; without it, the folder tells the labels."""
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
        return self.run_dir or Path("runs") / f"audit-{Path(os.path.abspath(self.folder)).name or 'root'}"

    @property
    def recipe_path(self) -> Path:
        return self.run.with_name(f"{self.run.name}.yaml")


def run_audit(options: AuditOptions) -> int:
    """Run an audit, or resume it; returns the exit code of the run. An audit that is refused writes nothing."""
    text, recipe = prepare_audit(options)
    code = run_recipe(recipe, options.recipe_path.stem, options.run, options.redo)
    write_bytes(options.recipe_path, text.encode())
    return code


def audit(
    folder: str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
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
        csv=_path(csv),
        weights=_path(weights),
        model=model,
        run_dir=_path(run_dir),
        download=download,
        overrides=overrides,
    )
    code = run_audit(options)
    if code == EXIT_STOPPED:
        raise CommandStopped(f"the audit in {options.run} was stopped; call it again to resume")
    return read_parquet(RunDirectory(options.run).labels_review_parquet, "list of labels to review")


def _path(given: str | os.PathLike[str] | None) -> Path | None:
    return Path(given) if given is not None else None


def prepare_audit(options: AuditOptions) -> tuple[str, Recipe]:
    """Choose the recipe of an audit; returns it as YAML, and with the overrides applied."""
    if detect_launch().size > 1:
        raise ConfigError(
            "`incv audit` runs in one process: start it without a launcher, then use the recipe that it writes with "
            "`incv run` on many"
        )
    data, samples, classes = find_images(options.folder, options.csv)
    device = select_device(ExecutionConfig()).type
    start = choose_network(options.model, options.weights, device, options.download)
    content = choose_recipe(data, samples, start, device, workers=os.cpu_count() or 1)
    header = _HEADER.format(folder=options.folder, samples=samples, classes=classes)
    text = header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    for override in options.overrides:
        apply_override(content, override)
    recipe = check_recipe(content, str(options.recipe_path))
    _log.info("audit: %s", describe_choice(start, samples, classes, recipe))
    return text, recipe


def find_images(folder: Path, csv: Path | None = None) -> tuple[dict[str, Any], int, int]:
    """Return the recipe's section `data.train` for a folder, and its numbers of images and classes."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder that contains the images")
    root = folder.resolve()
    data = find_layout(root, csv)
    options = SourceOptions(csv=data.get("csv"))
    source = open_source(data["source"], root, data["split"], options=options)
    samples, classes = len(source), len(source.class_names)
    require_two_classes("data.train", source.class_names)
    if samples < _MIN_SAMPLES:
        raise DataError(
            f"{folder} has {samples} images: an audit needs at least {_MIN_SAMPLES}, and hundreds to be of use"
        )
    return data | {"root": str(root)}, samples, classes


def find_layout(root: Path, csv: Path | None) -> dict[str, Any]:
    """Return source and split of a folder: a CSV file of labels, WebDataset tars, or one folder per class.

    Class folders may be in a folder `train`.
    """
    if csv is not None:
        return {"source": "image_csv", "split": "", "csv": str(csv.resolve())}
    folders = [entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if not folders and any(root.glob("*.tar")):
        return {"source": "webdataset", "split": ""}
    split = "train" if root / "train" in folders else ""
    inner = [entry for entry in (root / split).iterdir() if entry.is_dir()]
    if not inner and (any(root.glob("*.csv")) or any((root / split).glob("*.csv"))):
        return {"source": "image_csv", "split": split}
    return {"source": "image_folder", "split": split if inner else ""}


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
