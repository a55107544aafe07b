"""`incv clean` on a finished run of tiny."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import webdataset

from trainer.incv.selection_index import SelectionIndex, State
from trainer.outputs.clean import MARK


@pytest.fixture
def selected(finished: Path) -> dict[int, str]:
    """sample_id -> key of the samples that the run selected; the shards of the digits have no original files."""
    from trainer.outputs.finished_run import load_finished_run

    run = load_finished_run(finished)
    ids = run.selection.ids(State.SELECTED)
    assert 20 < len(ids) < 280
    return dict(zip(ids.tolist(), run.index.keys(ids), strict=True))


def labels_of(run: Path) -> dict[int, int]:
    import pyarrow.parquet as pq

    table = pq.read_table(run / "labels.parquet")
    return dict(zip(table["sample_id"].to_pylist(), table["label"].to_pylist(), strict=True))


def test_an_image_folder(finished, selected, incv):
    answer = incv("clean", finished, "--out", "cleaned")
    assert answer.code == 0, answer.err
    files = sorted(path for path in Path("cleaned").rglob("*") if path.is_file() and path.name != MARK)
    given = labels_of(finished)
    expected = sorted(str(given[sample_id]) for sample_id in selected)
    assert sorted(path.parent.name for path in files) == expected
    assert f"{len(selected)} samples" in answer.out
    assert not list(Path.cwd().glob(".cleaned*"))


def test_webdataset_reads_the_shards(finished, selected, incv):
    assert incv("clean", finished, "--out", "cleaned", "--as", "shards").code == 0
    tars = [str(path) for path in sorted(Path("cleaned").glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode("rgb8"))
    given = labels_of(finished)
    assert [int(sample["__key__"]) for sample in samples] == sorted(selected)
    for sample in samples:
        sample_id = int(sample["__key__"])
        assert sample["cls"] == given[sample_id] == sample["json"]["label"]
        assert sample["json"]["key"] == selected[sample_id]
        assert sample["png"].shape == (8, 8, 3)


def test_a_list_is_a_label_file(finished, selected, incv):
    assert incv("clean", finished, "--out", "kept.csv", "--as", "list").code == 0
    with open("kept.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    given = labels_of(finished)
    assert {row["key"]: row["label"] for row in rows} == {key: str(given[one]) for one, key in selected.items()}


def test_suggestions_are_added_with_their_label(finished, selected, incv):
    assert incv("clean", finished, "--out", "more", "--as", "shards", "--apply-suggestions", "0.2").code == 0
    tars = [str(path) for path in sorted(Path("more").glob("*.tar"))]
    facts = [sample["json"] for sample in webdataset.WebDataset(tars, shardshuffle=False).decode()]
    index = SelectionIndex.read(finished / "selection.parquet")
    added = [fact for fact in facts if fact["relabelled"]]
    assert len(facts) == len(selected) + len(added)
    assert added
    for fact in added:
        assert fact["label"] == index.predicted[fact["sample_id"]] != fact["given_label"]
        assert index.predicted_probability[fact["sample_id"]] >= 0.2
    assert json.loads(Path("more", MARK).read_text())["relabelled"] == len(added)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "--out", "x"], 2, "not a run directory"),
        (["RUN", "--out", "full"], 2, "not written by `incv clean`"),
        (["RUN", "--out", "full", "--force"], 2, "not written by `incv clean`"),
        (["RUN", "--out", "file"], 2, "is a file"),
        (["RUN", "--out", "full", "--as", "list"], 2, "is a folder"),
        (["RUN", "--out", "x", "--link"], 2, "leave --link out"),
        (["RUN", "--out", "x", "--as", "shards", "--link"], 2, "--as folder"),
    ],
)
def test_bad_input_writes_nothing(finished, incv, arguments, code, words):
    Path("full").mkdir()
    Path("full", "mine.txt").write_text("mine")
    Path("file").write_text("mine")
    before = sorted(str(path) for path in Path.cwd().rglob("*"))
    answer = incv("clean", *[str(finished) if word == "RUN" else word for word in arguments])
    assert (answer.code, words in answer.err) == (code, True), answer.err
    assert sorted(str(path) for path in Path.cwd().rglob("*")) == before


def test_an_earlier_output_is_replaced_only_by_force(finished, incv):
    assert incv("clean", finished, "--out", "cleaned").code == 0
    Path("cleaned", "extra").mkdir()
    assert incv("clean", finished, "--out", "cleaned").code == 2
    assert Path("cleaned", "extra").exists()
    assert incv("clean", finished, "--out", "cleaned", "--force").code == 0
    assert not Path("cleaned", "extra").exists()


def test_a_run_without_a_selection(finished, incv):
    (finished / "selection.parquet").unlink()
    answer = incv("clean", finished, "--out", "x")
    assert answer.code == 2
    assert "`incv` stage" in answer.err


def test_a_damaged_shard_is_named(finished, incv, selected):
    from trainer.outputs.finished_run import load_finished_run

    run = load_finished_run(finished)
    sample_id = next(iter(selected))
    path = run.index.shard_path(int(run.index.shard[sample_id]))
    folder = Path("data/shards/digits-train")
    copy = Path("copied")
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damaged = bytearray((copy / path.name).read_bytes())
    damaged[int(run.index.offset[sample_id])] ^= 255
    (copy / path.name).write_bytes(damaged)
    config = finished / "config.resolved.yaml"
    config.write_text(config.read_text().replace("data/shards/digits-train", "copied"))
    answer = incv("clean", finished, "--out", "x", "--as", "shards")
    assert answer.code == 3
    assert "incv shards verify" in answer.err
    assert not Path("x").exists()
    assert np.all([not name.name.startswith(".x") for name in Path.cwd().iterdir()])
