"""Packing with conversion: records, counts and report; the same bytes for any number of processes."""

import io
import tarfile

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.durable import read_json, write_json
from shards.pack import PackOptions, pack
from shards.sample_index import Dataset
from shards.sources import open_source
from shards.verify import verify
from tests.support.pictures import ListSource, contents, encoded, image_tree, picture, smooth


def _mixed() -> ListSource:
    turned = Image.Exif()
    turned[0x0112] = 6
    images = [
        encoded(smooth(30, 20), "JPEG"),
        encoded(smooth(30, 20), "PNG"),
        encoded(smooth(30, 20).convert("CMYK"), "JPEG"),
        encoded(smooth(30, 20), "JPEG", exif=turned),
        encoded(smooth(48, 20).quantize(200), "PNG"),
        encoded(smooth(400, 20), "JPEG"),
        b"\0\0\0\x20ftypavif" + bytes(99),
        encoded(smooth(30, 20), "JPEG"),  # the first again
    ]
    return ListSource([(f"k{row}", row % 2, data) for row, data in enumerate(images)])


def test_what_was_done_is_recorded(tmp_path):
    index = pack(_mixed(), tmp_path / "out", PackOptions(max_rejected=0.5, resize=16, quality=80))
    dataset = Dataset.load(tmp_path / "out")
    assert (dataset.resize, dataset.quality, dataset.subset, dataset.usable) == (16, 80, "", 7)
    assert dataset.converted == {"cmyk": 1, "cut": 1, "format": 2, "palette": 1, "resized": 7, "upright": 1}
    assert dataset.repeated == 1
    usable = index.usable_ids()
    assert [(int(index.width[row]), int(index.height[row])) for row in usable] == [
        *[(24, 16)] * 3,
        (16, 24),
        (38, 16),
        (128, 16),
        (24, 16),
    ]
    with tarfile.open(index.shard_path(0)) as tar:
        for member in tar:
            image = Image.open(io.BytesIO(tar.extractfile(member).read()))
            assert (image.format, min(image.size), member.name[-4:]) == ("JPEG", 16, ".jpg")
    assert not verify(tmp_path / "out").problems


def test_without_resize_only_what_must_be_is_converted(tmp_path):
    source = _mixed()
    index = pack(source, tmp_path / "out", PackOptions(max_rejected=0.5))
    assert index.dataset.resize is None
    assert index.dataset.converted == {"cmyk": 1, "palette": 1, "upright": 1}
    with tarfile.open(index.shard_path(0)) as tar:
        stored = {member.name: tar.extractfile(member).read() for member in tar}
    assert list(stored) == [f"{row:09d}.{'png' if row in (1, 4) else 'jpg'}" for row in (0, 1, 2, 3, 4, 5, 7)]
    for row in (0, 1, 5, 7):
        assert source.sample(row).data in stored.values()


def test_a_usable_image_with_a_wrong_name_is_named(tmp_path):
    rows = [("a.png", 0, picture()), ("b.png", 1, picture(kind="WEBP")), ("c.png", 0, picture()[:-9])]
    index = pack(ListSource(rows), tmp_path / "out", PackOptions(max_rejected=0.5))
    listed = [(row["key"], row["verdict"], row["reason"]) for row in index.read_rejected().to_pylist()]
    assert listed == [
        ("b.png", "ok", "WebP bytes in a .png"),
        ("c.png", "truncated", "damaged or truncated PNG image"),
    ]
    assert index.usable_ids().tolist() == [0, 1]
    assert not verify(tmp_path / "out").problems


def test_any_number_of_processes_writes_the_same_bytes(tmp_path):
    source = open_source("image_folder", image_tree(tmp_path / "root"), "train")
    pack(source, tmp_path / "one", PackOptions(samples_per_shard=4, resize=12))
    pack(source, tmp_path / "two", PackOptions(samples_per_shard=4, resize=12, workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from("abcdx"), min_size=1, max_size=20), st.integers(1, 7))
def test_duplicates_are_grouped_and_rejected_ones_are_not_among_them(tmp_path_factory, letters, per_shard):
    pictures = {letter: picture(ord(letter), 5, 4) for letter in "abcd"} | {"x": b"<html>"}
    source = ListSource([(f"k{row}", row % 2, pictures[letter]) for row, letter in enumerate(letters)])
    out = tmp_path_factory.mktemp("pack") / "out"
    index = pack(source, out, PackOptions(samples_per_shard=per_shard, max_rejected=1.0))
    rows = [row for row, letter in enumerate(letters) if letter != "x" and letters.count(letter) > 1]
    expected = [
        {"group": letters.index(letters[row]), "sample_id": row, "key": f"k{row}", "label": row % 2} for row in rows
    ]
    expected.sort(key=lambda line: (line["group"], line["sample_id"]))
    assert pq.read_table(out / "duplicates.parquet").to_pylist() == expected
    assert index.dataset.repeated == len(rows) - len({letters[row] for row in rows})


def test_an_image_of_another_size_than_was_asked_for_is_a_problem(tmp_path):
    out = tmp_path / "out"
    pack(_mixed(), out, PackOptions(max_rejected=0.5, resize=16))
    content = read_json(out / "dataset.json")
    write_json(out / "dataset.json", {**content, "resize": 17})
    assert "shorter side other than 17 pixels, for example sample 0 (k0): 24 x 16" in "\n".join(verify(out).problems)


def test_the_pack_of_another_format_is_refused(tmp_path):
    out = tmp_path / "out"
    pack(_mixed(), out, PackOptions(max_rejected=0.5))
    content = read_json(out / "dataset.json")
    for name in ("resize", "converted", "subset"):
        write_json(out / "dataset.json", {key: value for key, value in content.items() if key != name})
        with pytest.raises(Exception, match=name):
            Dataset.load(out)
