"""Classifies image files with the exported networks of a run (`incv predict`)."""

import glob
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from shards.csv_file import write_csv
from shards.durable import disk_errors, hash_file, read_json, remove_leftovers_of, require_own
from shards.errors import CommandStopped, ConfigError, DataError
from shards.image_check import MAX_BYTES
from shards.image_formats import REASONS, SUFFIXES, explain_verdict
from shards.image_store import convert_image
from shards.progress import Progress
from shards.regular_file import find_kind, open_to_append, read_regular, require_regular
from trainer.config.schema import NO_NETWORK, Recipe
from trainer.loading.augment import Geometry, centre_boxes
from trainer.loading.image_set import build_geometry
from trainer.loading.pixels import Normalise, Pixels, crop, decode
from trainer.records.run_directory import RunDirectory
from trainer.run.export import load_network
from trainer.run.feature_classifier import load_feature_classifier

TOP = 5
_BATCH = 64
_START = b'"path","predicted_label","probability"'  # of the CSV file
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Classifier:
    """Networks whose mean probabilities are predicted, with the preprocessing of their evaluation."""

    networks: tuple[nn.Module, ...]
    class_names: tuple[str, ...]
    geometry: Geometry
    normalise: Normalise
    resize: int | None
    """Shorter side to which packing resizes the images; None: packing keeps the size."""
    device: torch.device
    identity: str
    """Hash of the weights and of the preprocessing."""

    def read(self, path: Path) -> Pixels | str:
        """Return the network's input, uint8 [size, size, 3], or why the file cannot be used."""
        try:
            if kind := find_kind(path, follow=True):
                return f"{kind}, not a regular file"
            data = read_regular(path, MAX_BYTES + 1)
        except OSError as error:
            return error.strerror or str(error)
        if len(data) > MAX_BYTES:
            return REASONS["oversized"]
        stored = convert_image(data, self.resize)
        if stored.verdict != "ok":
            return explain_verdict(stored.verdict, data, SUFFIXES.get(path.suffix.lower(), ""))
        pixels = decode(stored.data)
        height, width = pixels.shape[:2]
        (box,) = centre_boxes(self.geometry, np.array([width], np.int32), np.array([height], np.int32))
        return crop(pixels, box, False, self.geometry.size, self.geometry.fill)

    @torch.inference_mode()
    def predict(self, images: Sequence[Pixels]) -> np.ndarray:
        """Return the mean probabilities of the networks: float32 [n, classes]."""
        batch = self.normalise(torch.from_numpy(np.stack(images)).to(self.device))
        outputs = [network(batch).float().softmax(dim=1) for network in self.networks]
        return torch.stack(outputs).mean(dim=0).cpu().numpy()


def load_classifier(run: RunDirectory, recipe: Recipe, method: str | None, network: str, device: str) -> Classifier:
    """Load the exported networks of a method (None: the last trained one), or the classifier of an audit.

    network: `a`, `b` or `mean`.
    """
    chosen = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    digest = hashlib.sha256(json.dumps([recipe.image.model_dump(), recipe.data.train.resize]).encode())
    if not recipe.methods:
        networks, described = _load_audit(run, recipe, method, digest)
    else:
        networks, described = _load_exports(run, recipe, method, network, digest)
    return Classifier(
        networks=tuple(each.to(chosen) for each in networks),
        class_names=tuple(described["label_names"]),
        geometry=build_geometry(recipe.image),
        normalise=Normalise(recipe.image.mean, recipe.image.std, chosen),
        resize=recipe.data.train.resize,
        device=chosen,
        identity=digest.hexdigest(),
    )


def _load_audit(
    run: RunDirectory, recipe: Recipe, method: str | None, digest: "hashlib._Hash"
) -> tuple[list[nn.Module], dict[str, Any]]:
    """Return the classifier on the features of an audit, and its description; adds its files to the digest."""
    if recipe.incv is None or recipe.incv.judge != "features":
        raise ConfigError(
            f"{run.root} has no classifier to predict with: its recipe, as that of an audit which trains, lists no "
            "training method. Run a recipe with `methods`, such as image_folder_finetune, on the same images first"
        )
    if method is not None:
        raise ConfigError(f"--method {method}: {run.root} trained no method; leave out --method")
    if recipe.model.name == NO_NETWORK:
        raise ConfigError(
            f"{run.root} has no network, since its features or predictions were given: run an audit without "
            "--embeddings and --predictions to get a classifier"
        )
    if not run.classifier.is_dir():
        raise ConfigError(f"{run.root} has no classifier yet: start the audit again, which finishes it")
    for name in ("head.safetensors", "config.json"):
        digest.update(hash_file(run.classifier / name).encode())
    return [load_feature_classifier(run, recipe)], read_json(run.classifier / "config.json")


def _load_exports(
    run: RunDirectory, recipe: Recipe, method: str | None, network: str, digest: "hashlib._Hash"
) -> tuple[list[nn.Module], dict[str, Any]]:
    """Return the exported networks of a method, and their description; adds their files to the digest."""
    trained = [name for name in recipe.methods if run.export(name).is_dir()]
    if not trained:
        raise ConfigError(f"{run.root} has no exported network: finish the run's `export` stage first")
    name = trained[-1] if method is None else method
    if name not in trained:
        raise ConfigError(f"--method {name}: {run.root} has exported networks of {', '.join(trained)} only")
    folders = sorted(run.export(name).glob("model_*"))
    if network != "mean":
        folders = [folder for folder in folders if folder.name == f"model_{network}"]
        if not folders:
            raise ConfigError(f"--network {network}: {name} has one network only; use --network a")
    for folder in folders:
        digest.update(hash_file(folder / "model.safetensors").encode())
    return [load_network(folder) for folder in folders], read_json(folders[0] / "config.json")


def list_images(root: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, sorted, without hidden ones; or the file itself."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise ConfigError(f"{root} is neither a folder nor a file")
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        found += [Path(folder) / name for name in sorted(files) if not name.startswith(".")]
    if not found:
        raise DataError(f"{root} contains no files")
    return found


def require_free(out: Path, force: bool) -> None:
    """Raise ConfigError unless `out` is free, or an earlier table of `incv predict` that `force` replaces."""
    require_own(out, _START, force, "choose another -o")


def classify(
    classifier: Classifier,
    root: Path,
    out: Path,
    workers: int,
    stop: Callable[[], bool] = lambda: False,
    force: bool = False,
) -> tuple[int, int]:
    """Write one CSV row per file of `root`; returns the numbers of classified and of unusable files.

    Finished rows go to a partial file next to `out`, from which the same command resumes.
    """
    paths = {_as_text(path): path for path in list_images(root)}
    schema = _schema(len(classifier.class_names))
    partial = out.with_name(f".{out.name}.{classifier.identity[:12]}.partial")
    _remove_other_partials(out, partial)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        done = {row["path"]: row for row in _read_rows(partial, schema) if row["path"] in paths}
        todo = [path for text, path in paths.items() if text not in done]
        with (
            open_to_append(partial) as file,
            ThreadPoolExecutor(workers) as pool,
            Progress("predicting", len(paths), done=len(done)) as progress,
        ):
            for first in range(0, len(todo), _BATCH):
                if stop():
                    raise CommandStopped(
                        f"stopped after {progress.done:,} files; run the same command again to resume"
                    )
                group = todo[first : first + _BATCH]
                for row in _predict_rows(classifier, group, list(pool.map(classifier.read, group))):
                    file.write(json.dumps(row).encode() + b"\n")
                    done[row["path"]] = row
                file.flush()
                progress.advance(len(group))
        require_free(out, force)
        write_csv(out, pa.Table.from_pylist([done[text] for text in paths], schema))
        partial.unlink()
    unusable = sum(row["problem"] is not None for row in done.values())
    return len(done) - unusable, unusable


def _as_text(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")  # a file name may be any bytes


def _column_names(classes: int) -> list[tuple[str, str]]:
    """Return the names of the label and probability columns, from the likeliest class on."""
    places = range(2, min(TOP, classes) + 1)
    return [("predicted_label", "probability"), *((f"label_{place}", f"probability_{place}") for place in places)]


def _schema(classes: int) -> pa.Schema:
    pairs = [
        pair for names in _column_names(classes) for pair in zip(names, (pa.string(), pa.float32()), strict=True)
    ]
    return pa.schema([("path", pa.string()), *pairs, ("problem", pa.string())])


def _predict_rows(
    classifier: Classifier, paths: Sequence[Path], images: Sequence[Pixels | str]
) -> Iterator[dict[str, Any]]:
    usable = [image for image in images if not isinstance(image, str)]
    probabilities = iter(classifier.predict(usable) if usable else ())
    names = _column_names(len(classifier.class_names))
    for path, image in zip(paths, images, strict=True):
        row: dict[str, Any] = {"path": _as_text(path), "problem": None}
        if isinstance(image, str):
            yield row | {"problem": image}
            continue
        scores = next(probabilities)
        for (label_name, score_name), label in zip(names, np.argsort(-scores, kind="stable"), strict=False):
            row |= {label_name: classifier.class_names[label], score_name: round(float(scores[label]), 6)}
        yield row


def _remove_other_partials(out: Path, partial: Path) -> None:
    """Remove what killed commands have left beside `out`, but the partial file of these networks."""
    remove_leftovers_of(out)
    for other in out.parent.glob(f".{glob.escape(out.name)}.{'[0-9a-f]' * 12}.partial"):
        if other != partial and find_kind(other) is None:
            other.unlink(missing_ok=True)


def _read_rows(partial: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Return the complete rows of a partial file; cuts off a row that a kill left incomplete.

    A damaged file is removed.
    """
    require_regular(partial)
    if not partial.exists():
        return []
    content = read_regular(partial)
    whole = content[: content.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        pa.Table.from_pylist(rows, schema)
        if not all((row["problem"] is None) == ("probability" in row) and row["path"] for row in rows):
            raise ValueError("a row has neither a probability nor a problem")
    except (ValueError, LookupError, TypeError, AttributeError, pa.ArrowException) as error:
        _log.warning("%s is damaged (%s): all files are classified again", partial, str(error).partition("\n")[0])
        partial.unlink()
        return []
    if len(whole) < len(content):
        os.truncate(partial, len(whole))
    return rows
