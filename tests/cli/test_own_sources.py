"""Runs on images with a list of labels and on WebDataset tars: what is used, what is left out, what is refused."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.csv_file import unescape_cell
from shards.durable import read_json
from tests.support.command_line import THREADS, TINY, Answer

Incv = Callable[..., Answer]
COUNT = 24
KINDS = ("png", "jpg", "webp", "gif", "bmp", "tif")
SETTINGS = (
    "data.eval={}", "labels={noise: none}", "batch.global=8", "methods=[standard]", "standard.epochs=1",
    "standard.optimizer={}", "incv={rounds: 1, epochs: 1, min_per_class: 2, remove_ratio: 0.2}", THREADS,
)  # fmt: skip


def _save(path: Path, number: int, kind: str | None = None) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, {"jpg": "JPEG", "tif": "TIFF"}.get(kind or path.suffix[1:], kind))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with 24 photos in six formats, one of them outside `photos`, and labels.csv."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    lines = ["Image;Kind;Note"]
    for number in range(COUNT):
        path = Path("photos") / f"{number:02d}.{KINDS[number % 6]}"
        path = Path("elsewhere.png") if number == 0 else path
        _save(path, number)
        lines.append(f"{path.resolve() if number == 0 else path.name};{'cat' if number % 2 else 'dog'};-")
    Path("labels.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    return tmp_path


def _train(**keys: str) -> str:
    given = {"source": "image_csv", "root": "photos", "csv": "labels.csv", "label_column": "kind", "shards": "packed"}
    return "data.train={" + ", ".join(f"{name}: {value}" for name, value in (given | keys).items()) + "}"


def _read(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return [{key: unescape_cell(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_photos_with_a_list(here: Path, incv: Incv) -> None:
    _save(Path("photos/unlisted.png"), 99)
    _save(Path("photos/05.tif"), 5, "WEBP")
    Path("photos/=notes.txt").write_text("no image")
    answer = incv("run", "-c", TINY, *SETTINGS, _train(partial="true", allow_outside="true"), "--run-dir", "run")
    assert answer.code == 0, answer.err
    assert "train: 2 files ignored, 1 image misnamed but used (listed in run/rejected.csv)" in answer.err
    assert "left out: run/rejected.csv (2 files ignored, 1 image misnamed but used)" in answer.out
    assert _read("run/rejected.csv") == [
        {"set": "train", "path": "05.tif", "outcome": "misnamed", "reason": "WebP bytes in a .tif"},
        {"set": "train", "path": "=notes.txt", "outcome": "ignored", "reason": "not an image by its suffix (.txt)"},
        {"set": "train", "path": "unlisted.png", "outcome": "ignored", "reason": "not listed in labels.csv"},
    ]
    assert read_json(Path("run/report.json"))["left_out"]["counts"] == {"ignored": 2, "misnamed": 1}
    assert "WebP bytes in a .tif" in Path("run/report.html").read_text()
    rows = _read("run/labels_review.csv")
    assert len(rows) == COUNT
    for row in rows:
        place = here / "elsewhere.png" if row["key"].startswith("/") else here / "photos" / row["key"]
        assert Path(row["path"]) == place
        assert place.is_file()
    assert incv("clean", "run", "--out", "cleaned").code == 0
    assert any(Path("cleaned").rglob("*.gif"))  # the original files
    assert incv("predict", "photos", "--run", "run", "-o", "out.csv").code == 0
    problems = {Path(row["path"]).name: row["problem"] for row in _read("out.csv")}
    assert problems.pop("=notes.txt") == "not an image"
    assert len(problems) == COUNT
    assert set(problems.values()) == {""}


def test_cleaned_shards_are_a_source(here: Path, incv: Incv) -> None:
    answer = incv("run", "-c", TINY, *SETTINGS, _train(allow_outside="true"), "--run-dir", "run")
    assert answer.code == 0, answer.err
    assert not Path("run/rejected.csv").exists()
    assert incv("clean", "run", "--out", "cleaned", "--as", "shards").code == 0
    packed = incv("shards", "pack", "webdataset", "--root", "cleaned", "--split", "", "--out", "again")
    assert packed.code == 0, packed.err
    assert f"{read_json(Path('cleaned/incv_clean.json'))['samples']} images of 2 classes" in packed.out


@pytest.mark.parametrize(
    ("keys", "code", "facts"),
    [
        ({}, 3, r"labels.csv, line 2 .*elsewhere.png'\): it is outside .*data.train.allow_outside"),
        ({"label_column": "lable"}, 2, "data.train.label_column: .*no column 'lable'"),
        ({"label_column": "note"}, 3, "have the label '-'"),
        ({"csv": "none.csv"}, 3, "data.train.csv: none.csv is not a file"),
        ({"source": "digits"}, 2, "data.train.csv: digits has no such option (only image_csv); leave it out"),
    ],
)
def test_refusals_use_the_words_of_the_recipe_and_write_nothing(
    here: Path, incv: Incv, keys: dict[str, str], code: int, facts: str
) -> None:
    extra = {} if not keys else {"allow_outside": "true"}
    answer = incv("run", "-c", TINY, *SETTINGS, _train(**extra, **keys), "--run-dir", "run")
    assert answer.code == code
    for fact in facts.split(".*"):
        assert fact.replace("\\", "") in answer.err
    assert not Path("packed").exists()
    assert not Path("run").exists()


def test_the_pack_command_takes_the_options(here: Path, incv: Incv) -> None:
    options = ("--csv", "labels.csv", "--label-column", "Kind", "--path-column", "image", "--allow-outside")
    _save(Path("photos/unlisted.png"), 99)
    command = ("shards", "pack", "image_csv", "--root", "photos", "--out", "packed", *options)
    refused = incv(*command)
    assert refused.code == 3
    assert "does not list 1 images" in refused.err
    assert "--partial" in refused.err
    assert not Path("packed").exists()
    answer = incv(*command, "--partial")
    assert answer.code == 0, answer.err
    assert "24 images of 2 classes" in answer.out
    assert "0 rejected, 1 files ignored (listed in rejected.parquet)" in answer.out
    printed = incv("run", "-c", TINY, *SETTINGS, _train(partial="true", allow_outside="true"), "--print-splits")
    for option in ("--csv=labels.csv", "--label-column=kind", "--partial", "--allow-outside"):
        assert option in printed.out.split()
