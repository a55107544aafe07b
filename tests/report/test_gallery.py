"""Which samples the gallery shows, from which sources, and what the page's script gets of them."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shards.durable import write_parquet
from tests.report.conftest import examine
from trainer.incv.confident import confident_joint
from trainer.incv.selection_index import SelectionIndex, State
from trainer.records.run_directory import RunDirectory
from trainer.report import write_report
from trainer.report.pictures import ENCODINGS, encode_pictures
from trainer.report.run import find_sources
from trainer.report.sections.gallery import MOST_FOUND, rank_within_class, take_first, take_spread

Make = Callable[..., Path]
labels_of_samples = st.lists(st.integers(0, 8), min_size=0, max_size=120).map(lambda each: np.array(each, np.int32))


def read_gallery(run_dir: Path) -> dict:
    page = (run_dir / "report.html").read_text()
    return json.loads(page.partition('id="gallery-data">')[2].partition("</script>")[0])


@given(labels=labels_of_samples, most=st.integers(1, 60))
def test_the_first_samples_are_taken_with_some_of_every_class(labels: np.ndarray, most: int) -> None:
    ids = np.arange(len(labels)) * 3
    taken = take_first(ids, labels, most)
    present = len(np.unique(labels))
    assert len(taken) == min(len(ids), max(most, present))
    assert (np.diff(taken) > 0).all()
    assert set(labels[taken // 3]) == set(labels)
    left = np.setdiff1d(ids, taken)
    for label in set(labels):  # of each class the first ones
        assert not len(left[labels[left // 3] == label]) or (
            taken[labels[taken // 3] == label].max() < left[labels[left // 3] == label].min()
        )


@given(labels=labels_of_samples, most=st.integers(1, 60))
def test_kept_samples_are_spread_over_each_class(labels: np.ndarray, most: int) -> None:
    ids = np.arange(len(labels)) * 3
    taken = take_spread(ids, labels, most)
    present = len(np.unique(labels))
    assert len(taken) <= max(most, present)
    assert set(labels[taken // 3]) == set(labels)
    ranks = rank_within_class(labels)
    assert all(0 in ranks[taken // 3][labels[taken // 3] == label] for label in set(labels))


@given(labels=labels_of_samples)
def test_ranks_count_earlier_samples_of_the_class(labels: np.ndarray) -> None:
    expected = [int((labels[:place] == label).sum()) for place, label in enumerate(labels)]
    assert rank_within_class(labels).tolist() == expected


def test_top_folders_with_several_classes_are_sources() -> None:
    keys = pa.chunked_array([["google/q1/a", "google/q2/b"], ["flickr/q1/c", "flickr/q2/d"]])
    found = find_sources(keys, np.array([0, 1, 0, 1]))
    assert found is not None
    assert (found.names, found.numbers.tolist()) == (["google", "flickr"], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        (["cat/1", "cat/2", "dog/3", "dog/4"], [0, 0, 1, 1]),  # a folder for each class
        (["train/1", "train/2"], [0, 1]),
        (["google/1", "google/2", "3", "4"], [0, 1, 0, 1]),
        ([f"{folder}/{label}" for folder in range(40) for label in range(2)], [0, 1] * 40),
        ([], []),
    ],
)
def test_other_keys_have_no_sources(keys: list[str], labels: list[int]) -> None:
    assert find_sources(pa.chunked_array([pa.array(keys, pa.string())]), np.array(labels, np.int64)) is None


def test_sources_are_counted_alone(make_run: Make) -> None:
    run_dir = make_run()
    keys = pa.chunked_array([[f"{'google' if number % 3 else 'flickr'}/{number}" for number in range(600)]])
    sources = find_sources(keys, np.arange(600) % 10)
    report = write_report(RunDirectory(run_dir), None, keys, None, sources)
    state = SelectionIndex.read(run_dir / "selection.parquet").state
    flickr = np.arange(600) % 3 == 0
    row = report["by_source"][0]
    assert row["name"] == "flickr"
    assert row["samples"] == np.sum(flickr & (state != State.OUTSIDE))
    assert row["selected"] == np.sum(flickr & (state == State.SELECTED))
    assert row["flagged"] == np.sum(flickr & np.isin(state, (State.CANDIDATE, State.REMOVED)))
    assert 0.2 < row["estimated_wrong"] < 0.6
    both = report["by_source"]
    assert sum(each["samples"] for each in both) == report["samples"]
    gallery = read_gallery(run_dir)
    assert [gallery["sources"][number] for number in gallery["source"]] == [
        "google" if number % 3 else "flickr" for number in gallery["id"]
    ]


def test_the_estimates_of_the_classes_add_up_to_the_confident_estimate(make_run: Make) -> None:
    run_dir = make_run()
    report = write_report(RunDirectory(run_dir))
    rows = report["selection"]["by_label"]
    first = pq.read_table(run_dir / "rounds/0/predictions.parquet", filters=[("status", "=", 0)])
    labels = pq.read_table(run_dir / "labels.parquet")["label"].to_numpy().astype(np.int64)
    columns = [first[name].to_numpy() for name in ("predicted", "given_probability", "predicted_probability")]
    expected = 1 - np.trace(confident_joint(labels[first["sample_id"]], *columns, 10))
    weighted = sum(row["estimated_wrong"] * row["samples"] for row in rows) / report["samples"]
    pairs = report["confusion"]["estimated_pairs"]
    assert weighted == pytest.approx(expected, rel=0.01)  # one sample is unreadable
    assert pairs[0]["count"] == max(pair["count"] for pair in pairs)
    assert sum(row["wrong"] * row["samples"] for row in rows) / report["samples"] == pytest.approx(
        report["noise"]["true"]
    )


def test_the_gallery_says_of_each_sample_what_the_run_knows(make_run: Make) -> None:
    run_dir = make_run()
    keys = pa.chunked_array([[f"key {number}" for number in range(600)]])
    write_report(RunDirectory(run_dir), lambda number: Image.new("L", (8, 8), number % 256), keys, "/photos")
    gallery, selection = read_gallery(run_dir), SelectionIndex.read(run_dir / "selection.parquet")
    ids = np.array(gallery["id"])
    assert len(set(ids)) == len(ids) == len(gallery["picture"])
    assert gallery["state"] == selection.state[ids].tolist()
    assert gallery["suggested"] == selection.predicted[ids].tolist()
    assert gallery["loss"] == pytest.approx(selection.loss[ids].tolist(), abs=1e-4)
    assert gallery["key"] == [f"key {number}" for number in ids]
    assert gallery["root"] == "/photos"
    flagged = ids[selection.state[ids] != State.SELECTED]
    assert set(flagged) == set(np.flatnonzero(np.isin(selection.state, (State.CANDIDATE, State.REMOVED))))
    assert all(gallery["picture"])


def test_images_with_a_finding_are_in_the_gallery_whether_flagged_or_not(make_run: Make) -> None:
    run_dir = make_run(samples=4000)
    kept = SelectionIndex.read(run_dir / "selection.parquet").ids(State.SELECTED)
    labels = pq.read_table(run_dir / "labels.parquet")["label"].to_numpy()
    one, other = kept[0], next(number for number in kept if labels[number] != labels[kept[0]])
    alike = kept[labels[kept] == labels[one]][5:7]
    examine(run_dir, [(one, other), alike], off_topic=kept[20:22], blank=range(100, 100 + 3 * MOST_FOUND))
    report = write_report(RunDirectory(run_dir), lambda _: Image.new("L", (8, 8)))
    gallery = read_gallery(run_dir)
    found = {each["name"]: each for each in gallery["found"]}
    shown = {name: [gallery["id"][row] for row in each["rows"]] for name, each in found.items()}
    assert sorted(shown["conflict"]) == [one, other]
    assert shown["duplicate"][:2] == shown["conflict"], "conflicting ones first, and together"
    assert set(shown["off_topic"]) == set(kept[20:22])
    assert MOST_FOUND <= len(shown["blank"]) < found["blank"]["total"] == 3 * MOST_FOUND
    assert set(found) == {"conflict", "duplicate", "off_topic", "blank"}
    assert all(gallery["picture"])
    assert gallery["flagged"] == report["flagged"], "few enough to show all"
    assert gallery["id"][0] in (one, other), "a label that a duplicate contradicts is flagged first"
    assert report["examination"]["conflicting"] == len({one, other} & set(gallery["id"][: gallery["flagged"]])) == 1


def test_probabilities_are_stated_only_where_they_are_calibrated(make_run: Make) -> None:
    run_dir = make_run()
    write_report(RunDirectory(run_dir))
    assert " % sure" not in (run_dir / "report.html").read_text()
    assert not read_gallery(run_dir)["calibrated"]
    examine(run_dir)
    write_report(RunDirectory(run_dir))
    assert (run_dir / "report.html").read_text().count(" % sure") >= 24
    assert read_gallery(run_dir)["calibrated"]


def test_earlier_decisions_are_repeated_in_new_corrections(make_run: Make) -> None:
    run_dir = make_run()
    table = {"key": ["a", "b", "c"], "given_label": ["1", None, "2"], "checked": [True, True, False]}
    write_parquet(run_dir / "labels_review.parquet", pa.table(table))
    write_report(RunDirectory(run_dir))
    assert read_gallery(run_dir)["earlier"] == [["a", "1"], ["b", None]]


def test_pictures_stay_within_the_limit_and_keep_to_the_order() -> None:
    noise = np.random.default_rng(0)
    images = [Image.fromarray(noise.integers(0, 256, (90, 90, 3), np.uint8)) for _ in range(40)]

    def image_of(number: int) -> Image.Image:
        if number == 3:
            raise OSError("truncated")
        return images[number]

    plenty = encode_pictures(range(40), image_of, 10_000_000)
    assert list(plenty) == [number for number in range(40) if number != 3]
    limit = sum(len(picture.base64) for picture in plenty.values()) // 2
    some = encode_pictures(range(40), image_of, limit)
    assert list(some) == list(plenty), "smaller, but all"
    few = encode_pictures(range(40), image_of, 3000)
    assert sum(len(picture.base64) for picture in few.values()) <= 3000
    assert list(few) == list(plenty)[: len(few)]
    assert ENCODINGS[0].size > ENCODINGS[-1].size


def test_small_images_are_stored_without_loss() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    picture = encode_pictures([0], lambda _: Image.fromarray(pixels), 100_000)[0]
    assert picture.pixelated
    np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(picture.data)).convert("RGB")), pixels)
