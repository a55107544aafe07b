"""Existing WebDataset tars: labels from .cls and .json members, and nothing trusted."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError
from shards.pack import PackOptions, pack
from shards.sources import SourceOptions, open_source
from shards.sources.webdataset import split_member_name
from tests.support.pictures import contents, picture


def _tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _members(start: int, labels: list[str], kind: str = "PNG", suffix: str = "png") -> list[tuple[str, bytes]]:
    members = []
    for number, label in enumerate(labels, start):
        members += [(f"{number:05d}.{suffix}", picture(number, kind=kind)), (f"{number:05d}.cls", label.encode())]
    return members


def _open(root: Path, split: str = "train", **options):
    return open_source("webdataset", root, split, options=SourceOptions(**options))


def _labels(source) -> dict[str, str]:
    return {source.key(row): source.class_names[source.label(row)] for row in range(len(source))}


def test_samples_come_in_the_order_of_the_tars(tmp_path):
    _tar(tmp_path / "train/b.tar", _members(2, ["1", "0"], "WEBP", "webp"))
    _tar(tmp_path / "train/a.tar", _members(0, ["0", "10"]))
    source = _open(tmp_path)
    assert source.class_names == ("0", "1", "10")
    assert list(_labels(source).items()) == [
        ("train/a/00000", "0"),
        ("train/a/00001", "10"),
        ("train/b/00002", "1"),
        ("train/b/00003", "0"),
    ]
    assert [source.sample(row).suffix for row in range(4)] == ["png", "png", "webp", "webp"]
    copy = pickle.loads(pickle.dumps(source))
    for row in range(4):
        assert copy.sample(row).data == picture(row, kind="PNG" if row < 2 else "WEBP")


@pytest.mark.parametrize("split", ["imagenet-train", "train", ""])
def test_tars_are_found_by_folder_or_by_the_start_of_their_name(tmp_path, split):
    place = {"imagenet-train": "imagenet-train-000.tar", "train": "train/x.tar", "": "x.tar"}[split]
    _tar(tmp_path / place, _members(0, ["0", "1"]))
    assert len(_open(tmp_path, split)) == 2
    with pytest.raises(ConfigError, match=r"contains no \.tar file"):
        _open(tmp_path, "val")


def test_classes_txt_names_the_numbers(tmp_path):
    _tar(tmp_path / "x.tar", _members(0, ["1", "0", "1"]))
    (tmp_path / "classes.txt").write_text("cat\ndog\nbird\n")
    source = _open(tmp_path, "")
    assert source.class_names == ("cat", "dog", "bird")
    assert list(_labels(source).values()) == ["dog", "cat", "dog"]
    (tmp_path / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"x/00000 has the label '1'.*classes\.txt.*0 to 0"):
        _open(tmp_path, "")
    (tmp_path / "classes.txt").write_text("cat\ncat\n")
    with pytest.raises(DataError, match="same class twice"):
        _open(tmp_path, "")


def test_labels_may_be_names_or_json(tmp_path):
    facts = [{"label": "dog", "x": 1}, {"label": "cat"}]
    members = [(f"k{n}.jpg", picture(n, kind="JPEG")) for n in range(2)]
    _tar(tmp_path / "x.tar", members + [(f"k{n}.json", json.dumps(each).encode()) for n, each in enumerate(facts)])
    assert _labels(_open(tmp_path, "")) == {"x/k0": "dog", "x/k1": "cat"}
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    assert _open(tmp_path, "").class_names == ("dog", "cat")
    with pytest.raises(DataError, match=r"neither k0\.cls nor a key breed"):
        _open(tmp_path, "", label_column="breed")


def test_samples_without_a_label_are_refused_unless_asked_for(tmp_path):
    extra = [
        ("x.png", picture(5)),
        ("y.cls", b"1"),
        ("z.txt", b"a caption"),
        ("w.jpg", picture(6)),
        ("w.json", b"[]"),
    ]
    _tar(tmp_path / "a.tar", [*_members(0, ["0", "1"]), *extra])
    with pytest.raises(DataError, match=r"x\.png has no label.*--partial"):
        _open(tmp_path, "")
    source = _open(tmp_path, "", partial=True)
    assert len(source) == 2
    assert sorted(source.ignored) == [
        ("a.tar: w.jpg", "no label"),
        ("a.tar: x.png", "no label"),
        ("a.tar: y", "a label without an image"),
        ("a.tar: z.txt", "neither an image nor a label"),
    ]


@pytest.mark.parametrize(
    ("members", "facts"),
    [
        ([("a.jpg", b"1"), ("a.png", b"1"), ("a.cls", b"0")], "two images, a.jpg and a.png"),
        ([("a.jpg", b"1"), ("a.cls", b"0"), ("a.cls", b"1")], "a.cls twice"),
        ([("a.jpg", b"1"), ("a.json", b"{")], "a.json is not JSON"),
        ([("a.jpg", b"1"), ("a.json", b"[" * 100_000)], "a.json is not JSON"),
        ([("a.jpg", b"1"), ("a.json", b'{"label": [1]}')], r"label in a.json is \[1\]"),
        ([("a.jpg", b"1"), ("a.cls", b"\xff")], "a.cls is not UTF-8"),
        ([("a.jpg", b"1"), ("a.cls", b"0" * 2**21)], "too many for a label"),
        ([("a.jpg", b"1"), ("a.cls", b"0"), ("b.jpg", b"1"), ("b.cls", b"0")], "all 2 samples have the label '0'"),
        ([("../a.jpg", b"1"), ("../a.cls", b"0")], "leaves the folder"),
        ([("/a.jpg", b"1")], "absolute path"),
        ([("a.pkl", b"1")], "pickle"),
        ([("a.txt", b"1")], "no image with a label"),
    ],
)
def test_bad_tars_are_refused(tmp_path, members, facts):
    _tar(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=facts):
        _open(tmp_path, "")


def test_links_and_compressed_tars_are_refused(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(DataError, match="a link"):
        _open(tmp_path, "")
    with tarfile.open(tmp_path / "x.tar", "w:gz") as tar:
        tar.add(__file__, "a.jpg")
    with pytest.raises(DataError, match="compressed"):
        _open(tmp_path, "")


def test_many_tars_do_not_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("shards.sources.webdataset._OPEN_TARS", 2)
    for number in range(5):
        _tar(tmp_path / f"{number}.tar", _members(number, [str(number)]))
    source = _open(tmp_path, "")
    for row in (0, 1, 2, 3, 4, 0, 2):
        assert source.sample(row).data == picture(row)
        assert sum(tar._file is not None for tar in source._tars) <= 2


def test_packing_does_not_depend_on_the_number_of_processes(tmp_path):
    for number in range(3):
        _tar(tmp_path / f"in/{number}.tar", _members(4 * number, ["0", "1", "1", "0"]))
    source = _open(tmp_path / "in", "")
    pack(source, tmp_path / "one", PackOptions(samples_per_shard=5))
    pack(source, tmp_path / "two", PackOptions(samples_per_shard=5, workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@given(st.text("ab./", max_size=12))
def test_names_are_split_as_webdataset_splits_them(name):
    """The key ends before the first dot of the file name, as in webdataset.tariterators.base_plus_ext."""
    from webdataset.tariterators import base_plus_ext

    theirs = base_plus_ext(name)
    key, suffix = split_member_name(name)
    if theirs[0] is not None and suffix:
        assert (key, suffix) == theirs
