"""`incv.audit` on data in memory: arrays, PIL images, and what looks like a Hugging Face Dataset."""

import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import incv as package
from shards.errors import InputError

FAST = ["execution.threads=1"]
CLASSES = ("zero", "one", "two")


@pytest.fixture(scope="session")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images uint8 [120, 8, 8, 3] in random order, given labels, of which every eighth is wrong, and true labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = np.concatenate([np.flatnonzero(digits.target == label)[:40] for label in range(3)])
    rows = np.random.default_rng(0).permutation(rows)
    true = digits.target[rows]
    given = np.where(np.arange(120) % 8 == 0, (true + 1) % 3, true)
    grey = (digits.images[rows] * 15.9).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=3), given, true


@pytest.fixture
def features(drawn) -> np.ndarray:
    return drawn[0][..., 0].reshape(120, -1).astype(np.float32)


@pytest.fixture(autouse=True)
def _in_playground(playground: Path) -> None:
    """Audits write into the current folder."""


@dataclass
class Image_:
    decode: bool = True


@dataclass
class ClassLabel:
    names: list[str]


@dataclass
class Value:
    dtype: str


Image_.__name__ = "Image"


class FakeDataset:
    """The part of `datasets.Dataset` that is used."""

    def __init__(self, columns: dict[str, list[Any]], features: dict[str, Any]) -> None:
        self.columns, self.features = columns, features

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str) -> Any:
        return self.columns[key]

    def __iter__(self):
        assert not any(getattr(feature, "decode", False) for feature in self.features.values()), "images are decoded"
        return (dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True))

    def cast_column(self, name: str, feature: Any) -> "FakeDataset":
        return FakeDataset(self.columns, self.features | {name: feature})

    def select_columns(self, names: list[str]) -> "FakeDataset":
        return FakeDataset({n: self.columns[n] for n in names}, {n: self.features[n] for n in names})


def encode(pixels: np.ndarray, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format=kind)
    return stream.getvalue()


def dataset(images: np.ndarray, labels: np.ndarray, names: tuple[str, ...] = CLASSES) -> FakeDataset:
    files = [{"bytes": encode(one, "PNG" if row % 2 else "BMP"), "path": None} for row, one in enumerate(images)]
    features = {"image": Image_(), "label": ClassLabel(list(names)), "note": Value("string")}
    return FakeDataset({"image": files, "label": labels.tolist(), "note": ["x"] * len(labels)}, features)


def rows_of(result: package.AuditResult) -> np.ndarray:
    return np.array([int(Path(key).stem) for key in result.samples["key"].to_pylist()])


def test_arrays(drawn, features):
    images, given, true = drawn
    result = package.audit((images, given), embeddings=features, overrides=FAST, progress=False)
    first = rows_of(result)[:12]
    assert (given != true)[first].mean() >= 0.9
    assert result.run.name.startswith("audit-")
    assert result.probabilities.column_names == ["key", "0", "1", "2"]
    written = result.run / "given" / "data" / "images" / "00000003.png"
    assert np.array_equal(np.asarray(Image.open(written)), images[3])
    before = written.stat().st_mtime_ns
    again = package.audit((images, given), embeddings=features, overrides=FAST, progress=False)
    assert again.samples.equals(result.samples)
    assert written.stat().st_mtime_ns == before
    other = package.audit((images, (given + 1) % 3), embeddings=features, overrides=FAST, progress=False)
    assert other.run != result.run
    with pytest.raises(InputError, match="other data"):
        package.audit((images, (given + 1) % 3), embeddings=features, run_dir=result.run, progress=False)
    with pytest.raises(InputError, match="--redo features"):
        package.audit((images, given), embeddings=features * 2, run_dir=result.run, overrides=FAST, progress=False)


def test_lists_of_pil_images_give_the_result_of_arrays(drawn, features):
    images, given, _ = drawn
    names = [CLASSES[label] for label in given]
    of_arrays = package.audit((images, names), embeddings=features, overrides=FAST, progress=False)
    pictures = [Image.fromarray(image) for image in images]
    of_pictures = package.audit((pictures, names), embeddings=features, overrides=FAST, progress=False)
    assert of_pictures.run == of_arrays.run
    assert set(of_arrays.samples["given_label"].to_pylist()) == set(CLASSES)


def test_a_hugging_face_dataset(drawn):
    images, given, true = drawn
    p = np.full((120, 4), 0.02)
    p[np.arange(120), true] = 0.94
    data = dataset(images, given, (*CLASSES, "unused"))
    result = package.audit(data, predictions=p, overrides=FAST, progress=False)
    assert result.probabilities.column_names == ["key", "one", "two", "zero"], (
        "sorted; the class without image is out"
    )
    assert (given != true)[rows_of(result)[:12]].mean() >= 0.9
    folder = result.run / "given" / "data" / "images"
    assert (folder / "00000001.png").read_bytes() == data["image"][1]["bytes"]
    assert (folder / "00000002.bmp").exists()


def test_arrays_for_a_folder(drawn, features):
    images, given, true = drawn
    for row, (image, label) in enumerate(zip(images, given, strict=True)):
        path = Path("photos", CLASSES[label], f"{row:03d}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    order = np.lexsort((np.arange(120), np.array(CLASSES)[given]))
    result = package.audit("photos", embeddings=features[order], overrides=FAST, progress=False)
    assert (given != true)[rows_of(result)[:12]].mean() >= 0.9


def test_progress_is_shown_unless_it_is_not_wanted(drawn, features, capsys):
    images, given, _ = drawn
    logger = logging.getLogger("trainer")
    before = logger.level, logger.propagate, list(logger.handlers)
    package.audit((images, given), embeddings=features, overrides=FAST, progress=False, run_dir="runs/silent")
    assert capsys.readouterr().err == ""
    assert "incv: done" in Path("runs/silent/logs/rank-0000.log").read_text()
    package.audit((images, given), embeddings=features, overrides=FAST, run_dir="runs/shown")
    assert "incv: done" in capsys.readouterr().err
    assert (logger.level, logger.propagate, logger.handlers) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, y: 7, "data is a int"),
        (lambda i, y: {"train": dataset(i, y)}, r"data\['train'\]"),
        (lambda i, y: (i / 255.0, y), "not uint8"),
        (lambda i, y: (i.transpose(0, 3, 1, 2), y), "channels last"),
        (lambda i, y: (i, y[:-1]), "120 images"),
        (lambda i, y: (i, y * 0.5), "whole number"),
        (lambda i, y: (i, y - 1), "negative"),
        (lambda i, y: (i, y * 0), "label"),
        (lambda i, y: (i[:5], y[:5]), "at least 20"),
        (lambda i, y: dataset(i, y - 1), "no label"),
        (lambda i, y: FakeDataset({"x": [1]}, {"x": Value("int")}), "path_column="),
    ],
)
def test_data_that_cannot_be_audited_is_refused(change, message, drawn):
    with pytest.raises(InputError, match=message):
        package.audit(change(*drawn[:2]), embeddings=np.eye(120), progress=False)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"embeddings": np.eye(7)}, "7 rows"),
        ({"embeddings": [["a"]]}, "of the type"),
        ({"predictions": np.eye(3)}, "120 images and 3 classes"),
        ({"predictions": "none.npy"}, "no such file"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(more, message, drawn):
    with pytest.raises(InputError, match=message):
        package.audit(drawn[:2], progress=False, **more)
