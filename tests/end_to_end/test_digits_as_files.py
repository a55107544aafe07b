"""The digits brought as own images: PNG files in one folder, a CSV of noisy labels, the settings of the demo."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shards.sources import open_source
from tests.support.command_line import exit_code

WRONG = 0.2


def write_digits(folder: Path, split: str) -> tuple[list[str], list[int]]:
    """Write the digits of a split as PNG files; returns their names and true labels."""
    source = open_source("digits", None, split)
    names, labels = [], []
    (folder / split).mkdir(parents=True)
    for row in range(len(source)):
        sample = source.sample(row)
        names.append(f"{split}/{row:04d}.png")
        labels.append(sample.label)
        (folder / names[-1]).write_bytes(sample.data)
    Image.open(folder / names[0]).verify()
    return names, labels


def write_rows(path: Path, header: tuple[str, str], names: list[str], labels: list[int]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=";").writerows([header, *zip(names, labels, strict=True)])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_digits_as_png_files_with_a_csv(tmp_path: Path) -> None:
    images = tmp_path / "images"
    for split in ("train", "test"):
        names, labels = write_digits(images, split)
        write_rows(images / f"{split}.csv", ("file", "class"), names, labels)
        if split == "train":
            rng = np.random.default_rng(0)
            given = np.array(labels)
            flipped = rng.permutation(len(given))[: round(WRONG * len(given))]
            given[flipped] = (given[flipped] + rng.integers(1, 10, len(flipped))) % 10
            write_rows(tmp_path / "noisy.csv", ("key", "label"), names, given.tolist())
    columns = "path_column: file, label_column: class"
    sets = {split: f"source: image_csv, split: {split}, root: '{images}', {columns}" for split in ("train", "test")}
    data = f"data={{train: {{{sets['train']}, shards: '{tmp_path}/t'}}, "
    data += f"eval: {{test: {{{sets['test']}, shards: '{tmp_path}/e'}}}}}}"
    labels = f"labels={{file: '{tmp_path}/noisy.csv', source_is_true: true}}"
    arguments = ["run", "-c", "demo", "--run-dir", tmp_path / "run", data, labels, "methods=[coteaching_incv]"]
    assert exit_code(arguments) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["noise"]["true"] == pytest.approx(WRONG, abs=0.001)
    assert report["selection"]["label_precision"] >= 0.99
    assert report["selection"]["label_recall"] >= 0.97
    assert report["accuracy"]["test"]["coteaching_incv"]["top1"] >= 98
