"""`incv predict` on a finished run of tiny."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shards.sample_index import SampleIndex
from trainer.loading.shard_reader import ShardReader
from trainer.run.export import load_network


@pytest.fixture
def images(playground: Path) -> Path:
    """The first 70 test digits as files (more than one batch), in a subfolder and with odd names."""
    index = SampleIndex.load(Path("data/shards/digits-test"))
    reader = ShardReader(index)
    folder = playground / "photos"
    (folder / "sub").mkdir(parents=True)
    for number in range(70):
        (folder / ("sub" if number % 2 else "") / f"={number:03d}, 'x'.png").write_bytes(reader.read(number))
    reader.close()
    return folder


def rows_of(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number_of(row: dict[str, str]) -> int:
    return int(Path(row["path"]).name[1:4])


def test_probabilities_are_those_of_the_exported_networks(finished, images, incv):
    """Computed once more from the files, without our loaders."""
    assert incv("predict", images, "--run", finished, "-o", "out.csv").code == 0
    rows = rows_of("out.csv")
    assert [Path(row["path"]) for row in rows] == sorted(
        images.rglob("*.png"), key=lambda path: (path.parent, path.name)
    )
    export = finished / "methods" / "coteaching_incv" / "export"
    networks = [load_network(export / f"model_{letter}") for letter in "ab"]
    for row in rows:
        pixels = np.asarray(Image.open(row["path"]).convert("RGB"), np.float32) / 255
        batch = torch.from_numpy((pixels - 0.3) / 0.35).permute(2, 0, 1)[None]
        with torch.no_grad():
            expected = torch.stack([network(batch).softmax(1) for network in networks]).mean(0)[0]
        top = expected.topk(5)
        assert [
            int(row["predicted_label"]),
            *(int(row[f"label_{place}"]) for place in range(2, 6)),
        ] == top.indices.tolist()
        found = [float(row["probability"]), *(float(row[f"probability_{place}"]) for place in range(2, 6))]
        assert found == pytest.approx(top.values.tolist(), abs=2e-5)


def test_one_network_and_another_method(finished, images, incv):
    arguments = ["predict", images, "--run", finished]
    assert incv(*arguments, "-o", "mean.csv").code == 0
    assert incv(*arguments, "-o", "a.csv", "--network", "a").code == 0
    assert incv(*arguments, "-o", "standard.csv", "--method", "standard").code == 0
    assert rows_of("mean.csv") != rows_of("a.csv") != rows_of("standard.csv")
    answer = incv(*arguments, "-o", "b.csv", "--method", "standard", "--network", "b")
    assert answer.code == 2
    assert "--network a" in answer.err
    answer = incv(*arguments, "-o", "b.csv", "--method", "bagging")
    assert answer.code == 2
    assert "coteaching_incv" in answer.err


def test_unusable_files_are_listed_with_the_reason(finished, images, incv):
    (images / "notes.txt").write_text("hello")
    (images / "broken.png").write_bytes((images / "=000, 'x'.png").read_bytes()[:60])
    (images / ".hidden").write_text("")
    os.symlink("nowhere", images / "dangling.png")
    answer = incv("predict", images, "--run", finished, "-o", "out.csv")
    assert answer.code == 0
    assert "70 images" in answer.out
    assert "3 files" in answer.out
    problems = {Path(row["path"]).name: row["problem"] for row in rows_of("out.csv") if row["problem"]}
    assert set(problems) == {"notes.txt", "broken.png", "dangling.png"}
    assert problems["notes.txt"] == "not an image"


def test_a_stopped_prediction_resumes(finished, images, incv, monkeypatch):
    """The first batch is kept, the second predicted by the second start; the result is that of one start."""
    from trainer.outputs import classify

    assert incv("predict", images, "--run", finished, "-o", "whole.csv").code == 0
    with monkeypatch.context() as stopping:
        stopping.setattr("trainer.cli._listen", lambda: iter([False, True]).__next__)
        stopped = incv("predict", images, "--run", finished, "-o", "out.csv")
    assert stopped.code == 75
    assert not Path("out.csv").exists()
    (partial,) = Path.cwd().glob(".out.csv.*.partial")
    with partial.open("a") as file:
        file.write('{"path": "torn')  # as a kill leaves it
    seen: list[str] = []
    read = classify.Classifier.read
    monkeypatch.setattr(classify.Classifier, "read", lambda self, path: seen.append(str(path)) or read(self, path))
    assert incv("predict", images, "--run", finished, "-o", "out.csv").code == 0
    assert len(seen) == 6
    assert Path("out.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert not list(Path.cwd().glob(".out.csv*"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "--run", "RUN", "-o", "x.csv"], 2, "neither a folder nor a file"),
        (["photos", "--run", "photos", "-o", "x.csv"], 2, "not a run directory"),
        (["photos", "--run", "RUN", "-o", "photos"], 2, "is a folder"),
        (["photos", "--run", "RUN", "-o", "there.csv"], 2, "was not written by this command"),
        (["photos", "--run", "RUN", "-o", "there.csv", "--force"], 2, "was not written by this command"),
        (["empty", "--run", "RUN", "-o", "x.csv"], 3, "no files"),
    ],
)
def test_bad_input_writes_nothing(finished, images, incv, arguments, code, words):
    Path("empty").mkdir()
    Path("there.csv").write_text("mine")
    answer = incv("predict", *[str(finished) if word == "RUN" else word for word in arguments])
    assert (answer.code, words in answer.err) == (code, True), answer.err
    assert Path("there.csv").read_text() == "mine"
    assert not Path("x.csv").exists()
