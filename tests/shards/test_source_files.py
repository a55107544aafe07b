"""The record of the files that a split was packed from, and what is found to have changed."""

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from shards.download import download_shards
from shards.errors import CommandStopped, ConfigError
from shards.pack import PackOptions, pack
from shards.sample_index import SampleIndex
from shards.source_files import SOURCE_FILES, Changes, find_changes, hash_content, read_source_files
from shards.sources import open_source
from shards.verify import verify
from tests.support.pictures import contents, image_tree, list_source, picture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return image_tree(tmp_path / "images", classes=2, per_class=4)


@pytest.fixture
def packed(root: Path, tmp_path: Path) -> SampleIndex:
    index = pack(open_source("image_folder", root, "train"), tmp_path / "out", PackOptions(samples_per_shard=3))
    assert index is not None
    return index


def changes_of(root: Path, index: SampleIndex) -> Changes:
    recorded = read_source_files(index.folder, index.dataset)
    assert recorded is not None
    return find_changes(open_source("image_folder", root, "train"), index, recorded)


def test_packing_records_path_size_time_and_checksum_of_every_file(root, packed):
    recorded = read_source_files(packed.folder, packed.dataset)
    assert recorded is not None
    assert (recorded.root, recorded.first_classes) == (str(root.resolve()), None)
    rows = recorded.table.to_pylist()
    assert [row["path"] for row in rows] == packed.keys()
    for row in rows:
        status = (root / row["path"]).stat()
        assert (row["file_nbytes"], row["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
    assert len({row["content"] for row in rows}) == len(rows)
    assert not changes_of(root, packed)


def test_a_rejected_file_is_recorded_too(root, tmp_path):
    (root / "train" / "class0" / "0.jpg").write_bytes(b"not an image")
    (root / "train" / "class1" / "copy.jpg").write_bytes(b"not an image")
    index = pack(open_source("image_folder", root, "train"), tmp_path / "out", PackOptions(max_rejected=0.5))
    assert index is not None
    assert index.dataset.repeated == 0, "rejected files do not count as duplicates"
    (root / "train" / "class0" / "0.jpg").write_bytes(b"another kind of text")
    assert changes_of(root, index) == Changes(changed=("train/class0/0.jpg",))


def test_a_source_without_files_has_no_record(tmp_path):
    index = pack(list_source(), tmp_path / "out")
    assert index is not None
    assert read_source_files(index.folder, index.dataset) is None
    assert not (index.folder / SOURCE_FILES).exists()


def test_the_first_classes_are_recorded(root, tmp_path):
    index = pack(open_source("image_folder", root, "train", classes=1), tmp_path / "out")
    assert index is not None
    recorded = read_source_files(index.folder, index.dataset)
    assert recorded is not None
    assert recorded.first_classes == 1
    assert not find_changes(open_source("image_folder", root, "train", classes=1), index, recorded)
    assert len(changes_of(root, index).added) == 4


def test_every_kind_of_change_is_found(root, packed):
    cats, dogs = root / "train" / "class0", root / "train" / "class1"
    (cats / "new.png").write_bytes(picture(99))
    (dogs / "0.jpg").unlink()
    (cats / "0.jpg").rename(dogs / "moved.jpg")
    data = bytearray((cats / "1.png").read_bytes())
    data[-20] ^= 1
    (cats / "1.png").write_bytes(data)  # of the same size
    os.utime(dogs / "1.png", ns=(1, 1))
    assert changes_of(root, packed) == Changes(
        added=("train/class0/new.png", "train/class1/moved.jpg"),
        removed=("train/class0/0.jpg", "train/class1/0.jpg"),
        changed=("train/class0/1.png",),
    )


def test_only_touched_files_are_read(root, packed, monkeypatch):
    read = []

    def record(data: bytes) -> bytes:
        read.append(data)
        return hash_content(data)

    monkeypatch.setattr("shards.source_files.hash_content", record)
    touched = root / "train" / "class0" / "1.png"
    os.utime(touched, ns=(5, 5))
    assert not changes_of(root, packed)
    assert read == [touched.read_bytes()]


def test_the_description_counts_all_and_names_a_few():
    changes = Changes(added=tuple("abcde"), removed=("f",), changed=("g", "h"))
    assert changes.describe() == "5 files added (a, b, c and 2 more), 1 file removed (f), 2 files changed (g, h)"


def test_a_copy_of_the_folder_elsewhere_is_compared_by_content(root, packed, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile)
    assert not changes_of(copy, packed)


def test_a_damaged_record_is_found(packed):
    pq.write_table(pq.read_table(packed.folder / SOURCE_FILES).slice(1), packed.folder / SOURCE_FILES)
    assert "does not match" in verify(packed.folder).problems[0]


def test_the_record_is_downloaded_with_the_shards(root, packed, tmp_path):
    download_shards(str(packed.folder), tmp_path / "copy")
    assert contents(tmp_path / "copy").keys() >= contents(packed.folder).keys()
    assert not changes_of(root, SampleIndex.load(tmp_path / "copy"))
    (packed.folder / SOURCE_FILES).unlink()  # as of an earlier version
    download_shards(str(packed.folder), tmp_path / "other")
    assert not (tmp_path / "other" / SOURCE_FILES).exists()


def test_a_resumed_packing_packs_changed_files_again(root, tmp_path):
    source = open_source("image_folder", root, "train")
    asked = iter([False, False, True])
    with pytest.raises(CommandStopped):
        pack(source, tmp_path / "out", PackOptions(samples_per_shard=3, stop=lambda: next(asked)))
    changed = root / "train" / "class0" / "0.jpg"
    changed.write_bytes(picture(77, kind="JPEG"))  # in the first shard, which is finished
    index = pack(source, tmp_path / "out", PackOptions(samples_per_shard=3))
    fresh = pack(source, tmp_path / "fresh", PackOptions(samples_per_shard=3))
    assert index is not None
    assert fresh is not None
    assert contents(index.folder) == contents(fresh.folder)
    assert not changes_of(root, index)


def test_packing_into_a_complete_folder_again_refuses_changed_files(root, packed, monkeypatch):
    source = open_source("image_folder", root, "train")
    (root / "train" / "class0" / "0.jpg").write_bytes(picture(99, kind="JPEG"))  # under the same name
    monkeypatch.setattr("shards.pack.MOST_COMPARED", 7)
    assert pack(source, packed.folder, PackOptions(samples_per_shard=3)) is not None, (
        "many files are compared on request"
    )
    with pytest.raises(ConfigError, match=r"1 file changed \(train/class0/0\.jpg\).*--out"):
        pack(source, packed.folder, PackOptions(samples_per_shard=3, check_source=True))
