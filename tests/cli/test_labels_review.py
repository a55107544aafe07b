"""The loop on a folder of images: run, look at labels_review.csv, correct it, run again."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from shards.csv_file import unescape_cell
from shards.durable import read_json
from shards.pack import PackOptions, pack
from shards.sources import open_source
from tests.support.command_line import TINY, Answer, contents, exit_code, unchanged
from tests.support.photos import PER_CLASS, PHOTO_RECIPE, write_photos
from trainer.incv.selection_index import SelectionIndex

Incv = Callable[..., Answer]
CLASSES = ("7", "=SUM(A1)", "birds, small")  # the name 7 is not the number of its class


@pytest.fixture(scope="module")
def reviewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, their shards and a finished run; do not write to it."""
    folder = tmp_path_factory.mktemp("reviewed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_photos(Path("photos"), CLASSES)
        Path("photos", CLASSES[0], "broken.png").write_bytes(b"no image")
        pack(open_source("image_folder", Path("photos"), ""), Path("packed"), PackOptions(max_rejected=0.1))
        assert exit_code(["run", "-c", TINY, *PHOTO_RECIPE, "--run-dir", "run"]) == 0
    return folder


@pytest.fixture
def folder(reviewed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a copy of `reviewed`."""
    shutil.copytree(reviewed, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def labels_of(run: str) -> dict[int, int]:
    table = pq.read_table(f"{run}/labels.parquet")
    return dict(zip(table["sample_id"].to_pylist(), table["label"].to_pylist(), strict=True))


def names_of(run: str) -> dict[str, Any]:
    """The list's given label by key."""
    table = pq.read_table(f"{run}/labels_review.parquet")
    return dict(zip(table["key"].to_pylist(), table["given_label"].to_pylist(), strict=True))


def run(incv: Incv, *arguments: str) -> Answer:
    answer = incv("run", "-c", TINY, *PHOTO_RECIPE, *arguments)
    assert answer.code == 0, answer.err
    return answer


def test_the_list_of_a_run(reviewed: Path, folder: Path, incv: Incv) -> None:
    answer = run(incv, "--run-dir", "run")
    assert "\nlabels: run/labels_review.csv (all samples, most suspicious first)\n" in answer.out
    assert read_json(Path("run/report.json"))["labels_review"] == "labels_review.csv"
    assert "<code>labels_review.csv</code>" in Path("run/report.html").read_text()
    rows = read_rows(Path("run/labels_review.csv"))
    assert len(rows) == 3 * PER_CLASS + 1
    assert rows[-1]["state"] == "rejected"
    assert rows[-1]["key"] == "7/broken.png"
    for row in rows:
        assert Path(row["path"]) == reviewed / "photos" / unescape_cell(row["key"])
        assert Path(row["path"]).is_file()
        assert unescape_cell(row["given_label"]) == Path(row["path"]).parent.name
    selection = SelectionIndex.read(Path("run/selection.parquet"))
    for row in rows[:-1]:
        assert float(row["loss"]) == pytest.approx(selection.loss[int(row["sample_id"])], rel=1e-6)
        assert (row["is_label_issue"] == "true") == (row["state"] in ("candidate", "removed"))
    losses = [float(row["loss"]) for row in rows[:-1]]
    assert losses == sorted(losses, reverse=True)
    suspects = [suspect["sample_id"] for suspect in read_json(Path("run/report.json"))["suspicious"]]
    listed = [int(row["sample_id"]) for row in rows]
    assert suspects == [number for number in listed if number in suspects]


def test_an_edited_list_changes_and_excludes_samples(folder: Path, incv: Incv) -> None:
    rows = read_rows(Path("run/labels_review.csv"))
    changed = next(row for row in rows if row["given_label"] == "7")
    excluded = next(row for row in rows if row["given_label"] == "'=SUM(A1)")
    changed["given_label"], excluded["given_label"] = "birds, small", ""
    write_rows(Path("mended.csv"), rows)
    answer = run(incv, "labels.corrections=mended.csv", "labels.source_is_true=true", "--run-dir", "second")
    assert "labels.corrections: 1 corrected, 0 confirmed, 1 excluded" in answer.err
    before, after = labels_of("run"), labels_of("second")
    gone, other = int(excluded["sample_id"]), int(changed["sample_id"])
    assert after == {**{number: label for number, label in before.items() if number != gone}, other: 2}
    truth = pq.read_table("second/true_labels.parquet").to_pydict()
    assert dict(zip(truth["sample_id"], truth["label"], strict=True)) == {
        number: label for number, label in before.items() if number != gone
    }
    assert read_json(Path("second/report.json"))["samples"] == 3 * PER_CLASS - 1
    (row,) = (row for row in read_rows(Path("second/labels_review.csv")) if row["sample_id"] == str(gone))
    assert (row["state"], row["given_label"], row["loss"], row["is_label_issue"]) == ("excluded", "", "", "false")
    assert row["checked"] == "true", "decided by hand: not to be looked at again"
    assert read_rows(Path("second/labels_review.csv"))[-1] == row
    # The new list says the same, so it can be edited and used in turn.
    shutil.copyfile("second/labels_review.csv", "again.csv")
    answer = incv("labels", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=again.csv", "--run-dir", "third")
    assert answer.code == 0, answer.err
    assert labels_of("third") == after
    assert "1 corrected, 0 confirmed, 1 excluded" in answer.err
    # A corrected label takes the sample in again.
    rows = read_rows(Path("again.csv"))
    rows[-1]["corrected_label"] = "7"
    write_rows(Path("back.csv"), rows)
    answer = incv("labels", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=back.csv", "--run-dir", "fourth")
    assert "2 corrected, 0 confirmed, 0 excluded" in answer.err
    assert labels_of("fourth") == {**after, gone: 0}


def test_a_label_checked_by_hand_is_never_overruled(folder: Path, incv: Incv) -> None:
    """The most doubtful label is confirmed and another sample gets a wrong one: both stay, with their labels."""
    rows = read_rows(Path("run/labels_review.csv"))
    confirmed = next(row for row in rows if row["is_label_issue"] == "true")
    corrected = next(row for row in rows if row["given_label"] == "7" and row is not confirmed)
    confirmed["corrected_label"], corrected["corrected_label"] = confirmed["given_label"], "birds, small"
    write_rows(Path("mended.csv"), rows)
    answer = run(incv, "labels.corrections=mended.csv", "--run-dir", "second")
    assert "labels.corrections: 1 corrected, 1 confirmed, 0 excluded" in answer.err
    counts = read_json(Path("second/report.json"))["corrections"]
    assert {what: counts[what] for what in ("corrected", "confirmed", "excluded")} == {
        "corrected": 1, "confirmed": 1, "excluded": 0,
    }  # fmt: skip
    checked = {row["key"]: row for row in read_rows(Path("second/labels_review.csv")) if row["checked"] == "true"}
    assert checked.keys() == {confirmed["key"], corrected["key"]}
    assert {(row["state"], row["is_label_issue"]) for row in checked.values()} == {("selected", "false")}
    done = incv("clean", "second", "--out", "kept.csv", "--as", "list", "--apply-suggestions", "0")
    assert "2 of them checked by hand" in done.out
    kept = {row["key"]: row["label"] for row in read_rows(Path("kept.csv"))}
    assert kept[confirmed["key"]] == confirmed["given_label"]
    assert kept[corrected["key"]] == "birds, small"
    # The new list carries the marks, so a further round of corrections does not lose them.
    shutil.copyfile("second/labels_review.csv", "again.csv")
    answer = incv("labels", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=again.csv", "--run-dir", "third")
    assert "1 corrected, 1 confirmed, 0 excluded" in answer.err


def test_corrections_lie_over_a_label_file(folder: Path, incv: Incv) -> None:
    rows = read_rows(Path("run/labels_review.csv"))
    turned = {"7": "'=SUM(A1)", "'=SUM(A1)": "birds, small", "birds, small": "7"}
    write_rows(Path("file.csv"), [{"key": row["key"], "label": turned[row["given_label"]]} for row in rows])
    Path("mended.csv").write_text('7/00.png,"birds, small"\n7/01.png,\n')
    both = "labels={file: file.csv, corrections: mended.csv}"
    answer = incv("labels", "-c", TINY, *PHOTO_RECIPE, both, "--run-dir", "other")
    assert answer.code == 0, answer.err
    before = {number: (label + 1) % 3 for number, label in labels_of("run").items()}
    del before[1]
    assert labels_of("other") == {**before, 0: 2}


def test_changed_corrections_are_refused_until_the_labels_are_redone(folder: Path, incv: Incv) -> None:
    Path("mended.csv").write_text("7/00.png,\n")
    with unchanged(folder / "run"):
        answer = incv("run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=mended.csv", "--run-dir", "run")
    assert answer.code == 2
    assert "labels.corrections_checksum" in answer.err
    assert "--redo labels" in answer.err
    old = contents(Path("run"))
    run(incv, "labels.corrections=mended.csv", "--run-dir", "run", "--redo", "labels")
    assert names_of("run")["7/00.png"] is None
    (moved,) = Path("run/old").iterdir()
    for name in ("labels_review.csv", "labels_review.parquet"):
        assert (moved / name).read_bytes() == old[name]
    assert 0 not in labels_of("run")
    # Moving the file changes nothing; changing its content does.
    Path("mended.csv").rename("moved.csv")
    assert "incv: already done" in run(incv, "labels.corrections=moved.csv", "--run-dir", "run").err
    Path("moved.csv").write_text("7/00.png,\n7/01.png,\n")
    assert incv("run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=moved.csv", "--run-dir", "run").code == 2


def test_a_list_is_kept_if_edited_and_made_again_if_lost(reviewed: Path, folder: Path, incv: Incv) -> None:
    files = {name: Path("run", name).read_bytes() for name in ("labels_review.csv", "labels_review.parquet")}
    Path("run/labels_review.csv").write_text("key,label\n7/00.png,7\n")
    run(incv, f"data.train.root={reviewed / 'photos'}", "--run-dir", "run")
    assert Path("run/labels_review.csv").read_text() == "key,label\n7/00.png,7\n"
    for name in files:
        Path("run", name).unlink()
    run(incv, f"data.train.root={reviewed / 'photos'}", "--run-dir", "run")
    assert {name: Path("run", name).read_bytes() for name in files} == files


def test_the_list_of_the_run_itself_is_refused(folder: Path, incv: Incv) -> None:
    """`--redo labels` would move it away before it is read again."""
    with unchanged(folder):
        own = "labels.corrections=run/labels_review.csv"
        answer = incv("run", "-c", TINY, *PHOTO_RECIPE, own, "--run-dir", "run", "--redo", "labels")
    assert answer.code == 2
    assert "copy it" in answer.err


def test_another_path_is_another_default_directory(folder: Path, incv: Incv) -> None:
    places = [
        incv("run", "-c", TINY, *PHOTO_RECIPE, *more, "--print-run-dir").out
        for more in ([], ["labels.corrections=a.csv"], ["labels.corrections=b.csv"])
    ]
    assert len(set(places)) == 3


def test_the_plan_names_the_file(folder: Path, incv: Incv) -> None:
    Path("mended.csv").write_text("7/00.png,emu\n")
    answer = incv("run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=mended.csv", "--run-dir", "new", "--dry-run")
    assert "noise none, corrections mended.csv" in answer.out
    assert "would be refused: labels.corrections mended.csv, line 1: 'emu', the label of '7/00.png'" in answer.out


BAD: dict[str, tuple[str, list[str]]] = {
    "unknown_key": ("7/99.png,7\n", ["line 1", "7/99.png", "keys look like"]),
    "twice": ("7/00.png,7\n7/00.png,7\n", ["line 2", "7/00.png", "twice"]),
    "unknown_class": ("7/00.png,emu\n", ["line 1", "'emu'", "7/00.png"]),
    "not_text": ("\udcff\udcfe", ["cannot be read", "UTF-8"]),
    "a_class_emptied": ("".join(f"7/{n:02d}.png,\n" for n in range(PER_CLASS)), ["1 class(es) have no sample", "7"]),
    "too_few_left": (
        "".join(f"{name},\n" for name in [f"{c}/{n:02d}.png" for c in ("7", "=SUM(A1)") for n in range(PER_CLASS)])
        + "".join(f'"birds, small/{n:02d}.png",\n' for n in range(5)),
        ["has 7 training samples", "29 are excluded by labels.corrections", "batch.global"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_wrong_corrections_are_refused(kind: str, folder: Path, incv: Incv) -> None:
    text, named = BAD[kind]
    Path("mended.csv").write_bytes(text.encode(errors="surrogateescape"))
    with unchanged(folder):
        answer = incv("run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=mended.csv", "--run-dir", "new")
    assert answer.code == 3
    for words in named:
        assert words in answer.err


def test_a_missing_file_is_refused(folder: Path, incv: Incv) -> None:
    with unchanged(folder):
        answer = incv("run", "-c", TINY, *PHOTO_RECIPE, "labels.corrections=nowhere.csv", "--run-dir", "new")
    assert answer.code == 3
    assert "labels.corrections nowhere.csv cannot be read" in answer.err


def test_other_tools_read_the_list(folder: Path) -> None:
    table = pyarrow.csv.read_csv("run/labels_review.csv")
    assert table.column_names == pq.read_table("run/labels_review.parquet").column_names
    assert table.schema.field("label_quality").type == pa.float64()
    assert table.schema.field("is_label_issue").type == pa.bool_()
