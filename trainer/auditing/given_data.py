"""Writes data that are given in Python, images and labels in memory, as files that an audit can read.

RUN_DIR/given/data/images/00000000.png ...   the images, in the order of the data
RUN_DIR/given/data/labels.csv                path, label
RUN_DIR/given/data/data.json                 the hash of images and labels
RUN_DIR/given/embeddings.npy, predictions.npy or predictions.parquet
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image

from shards.csv_file import write_csv
from shards.durable import atomic_folder, read_json, write_array, write_json, write_parquet
from shards.errors import ConfigError, DataError, list_some
from shards.image_formats import DECODED, recognise_format
from shards.progress import Progress
from shards.regular_file import read_regular
from shards.sources.source import sort_class_names
from trainer.incv.probability_table import build_probability_table
from trainer.records.run_directory import RunDirectory

FORMS = "a folder, a Hugging Face Dataset, or a pair (images, labels)"
_IMAGE, _CLASSES = "Image", "ClassLabel"  # types of features of a Hugging Face data set
_LABEL_COLUMNS = ("label", "labels", "class", "category", "target")
_NO_LABEL = -1


@dataclass(frozen=True, eq=False)
class GivenData:
    """Images and labels in memory."""

    count: int
    encoded: Callable[[], Iterator[bytes]]
    """Yields the images as files, in order, each time it is called."""
    labels: Sequence[str]
    class_names: Sequence[str]
    """All classes, in the order of the columns of predictions; some may have no image."""

    def file_names(self) -> list[str]:
        """Return the name of each image without suffix; sorted, they are in the order of the data."""
        return [f"{row:08d}" for row in range(self.count)]


def is_folder(data: Any) -> bool:
    return isinstance(data, str | os.PathLike)


def read_given(data: Any, image_column: str | None = None, label_column: str | None = None) -> GivenData:
    """Return the images and labels of a data set in memory; raises InputError if it has none.

    image_column, label_column: of a Hugging Face data set, if there are several.
    """
    if isinstance(data, dict):
        part = next(iter(data), "train")
        raise ConfigError(f"data is a dictionary of {list_some(list(data))}: choose a part of it, data[{part!r}]")
    if hasattr(data, "features") and hasattr(data, "column_names"):
        return _read_dataset(data, image_column, label_column)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _read_arrays(*data)
    raise ConfigError(f"data is a {type(data).__name__}; give {FORMS}")


def write_given(given: GivenData, root: Path | None) -> tuple[Path, Path, Path]:
    """Write images and labels once; return the run directory, the folder of the images and the list of labels.

    root: the run directory; None: one that is named by the content.
    """
    digest = hashlib.sha256("\0".join([*given.class_names, "", *given.labels]).encode())
    for image in given.encoded():
        digest.update(hashlib.sha256(image).digest())
    content = digest.hexdigest()
    run = RunDirectory(root or Path("runs") / f"audit-{content[:8]}")
    run.require_run_directory()
    folder = run.given / "data"
    if not (folder / "data.json").exists():
        with atomic_folder(folder) as temporary:
            _write_images(given, temporary)
            write_json(temporary / "data.json", {"hash": content})
    elif read_json(folder / "data.json")["hash"] != content:
        raise ConfigError(f"{run.root} is an audit of other data: choose another run_dir")
    return run.root, folder / "images", folder / "labels.csv"


def write_embeddings(array: Any, run: Path) -> Path:
    """Write an array of features into the run directory; return its file."""
    path = RunDirectory(run).given / "embeddings.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_array(path, _as_numbers("embeddings", array))
    return path


def write_predictions(array: Any, run: Path, given: GivenData | None) -> Path:
    """Write an array of probabilities into the run directory; return its file.

    given: the data, whose classes name the columns. Columns of classes without an image are left out.
    """
    folder, values = RunDirectory(run).given, _as_numbers("predictions", array)
    folder.mkdir(parents=True, exist_ok=True)
    if given is None:
        write_array(folder / "predictions.npy", values)
        return folder / "predictions.npy"
    names = given.class_names
    if values.ndim != 2 or len(values) != given.count or values.shape[1] not in (len(names), len(set(given.labels))):
        raise DataError(
            f"predictions have the shape {list(values.shape)}, but the data have {given.count:,} images and "
            f"{len(names):,} classes ({list_some(names)}): give one row for each image, one column for each class"
        )
    present = [name for name in names if name in set(given.labels)]
    if len(present) < values.shape[1]:
        values = values[:, [names.index(name) for name in present]].astype(np.float64)
        values = values / values.sum(axis=1, keepdims=True)
    suffixes = [path.name for path in sorted((folder / "data" / "images").iterdir())]
    write_parquet(folder / "predictions.parquet", build_probability_table(suffixes, values, present))
    return folder / "predictions.parquet"


def _write_images(given: GivenData, folder: Path) -> None:
    (folder / "images").mkdir()
    paths = []
    with Progress("writing images", given.count) as progress:
        for name, image in zip(given.file_names(), given.encoded(), strict=True):
            suffix = DECODED.get(recognise_format(image), "jpg")
            paths.append(f"{name}.{suffix}")
            (folder / "images" / paths[-1]).write_bytes(image)
            progress.advance()
    write_csv(folder / "labels.csv", pa.table({"path": paths, "label": pa.array(given.labels, pa.string())}))


def _as_numbers(what: str, array: Any) -> npt.NDArray[Any]:
    values = np.asarray(array)
    if values.dtype.kind not in "fiu":
        raise DataError(f"{what} are of the type {values.dtype}: give an array of numbers, or the path of a file")
    return values


def _read_dataset(data: Any, image_column: str | None, label_column: str | None) -> GivenData:
    """Read a Hugging Face data set, by what its features are called: `datasets` need not be installed."""
    features = data.features
    if not hasattr(data, "__len__") or not features:
        raise ConfigError("data is a stream: give a Dataset with a known length, load_dataset(..., streaming=False)")
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    images = [name for name, kind in kinds.items() if kind == _IMAGE]
    labelled = [name for name, kind in kinds.items() if kind == _CLASSES]
    image = _choose("path_column", image_column, images, kinds)
    label = _choose("label_column", label_column, labelled or [n for n in kinds if n in _LABEL_COLUMNS], kinds)
    encoded = data.cast_column(image, type(features[image])(decode=False))
    column = encoded.select_columns([image]) if hasattr(encoded, "select_columns") else encoded

    def read() -> Iterator[bytes]:
        for row in column:
            content, path = row[image]["bytes"], row[image]["path"]
            yield read_regular(Path(path)) if content is None else content

    numbers = list(data[label])
    if kinds[label] != _CLASSES:
        return _with_labels(len(data), read, numbers)
    names = [str(name) for name in features[label].names]
    if unlabelled := sum(number is None or number == _NO_LABEL for number in numbers):
        raise DataError(f"{unlabelled:,} of {len(data):,} images have no label: leave them out with data.filter")
    return GivenData(len(data), read, [names[number] for number in numbers], names)


def _choose(option: str, named: str | None, found: Sequence[str], kinds: dict[str, str]) -> str:
    """Return the column to use. found: those that suit; kinds: the type of every column."""
    what = "images" if option == "path_column" else "labels"
    shown = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if named is not None and named not in kinds:
        raise ConfigError(f"data has no column {named!r}: its columns are {shown}")
    if named is None and len(found) != 1:
        raise ConfigError(f"data has {len(found) or 'no'} columns of {what}: name one with {option}=; it has {shown}")
    return named or found[0]


def _read_arrays(images: Any, labels: Any) -> GivenData:
    """Read images in one uint8 array [n, h, w, 3] (or [n, h, w]) or in a list of arrays or PIL images."""
    count = len(images)

    def read() -> Iterator[bytes]:
        for row in range(count):
            stream = io.BytesIO()
            _as_picture(images[row], row).save(stream, format="PNG", compress_level=1)
            yield stream.getvalue()

    return _with_labels(count, read, labels)


def _as_picture(image: Any, row: int) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8:
        raise DataError(
            f"image {row} is of the type {pixels.dtype}, not uint8: give the pixels as they are, 0 to 255, without "
            "normalisation"
        )
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if not pixels.size or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        raise DataError(
            f"image {row} has the shape {list(pixels.shape)}: give [height, width, 3], the channels last, or "
            "[height, width]"
        )
    return Image.fromarray(np.ascontiguousarray(pixels))


def _with_labels(count: int, read: Callable[[], Iterator[bytes]], labels: Any) -> GivenData:
    """Name the classes by the labels, numbers or texts."""
    values = np.asarray(labels)
    if values.shape != (count,):
        raise DataError(
            f"there are {count:,} images, but labels of the shape {list(values.shape)}: give one for each"
        )
    texts = [str(value).strip() for value in values.tolist()]
    is_text = all(isinstance(value, str) for value in values.tolist())
    if (values.dtype.kind not in "iu" and not is_text) or "" in texts:
        raise DataError(
            f"labels are of the type {values.dtype}: give a whole number or a text that is not empty for each"
        )
    if values.dtype.kind not in "iu":
        return GivenData(count, read, texts, sort_class_names(texts))
    if int(values.min(initial=0)) < 0:
        raise DataError("some labels are negative: leave out images without a label")
    every = range(int(values.max(initial=0)) + 1)  # predictions may have a column for a class without an image
    names = [str(number) for number in every] if len(every) <= count else sort_class_names(texts)
    return GivenData(count, read, texts, names)
