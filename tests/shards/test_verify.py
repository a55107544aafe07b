"""Verification of packed folders: any damage is found and named, and an intact folder is cheap to check."""

import hashlib
import os
import pickle
import shutil
import struct

import numpy as np
import pytest

from shards import verify as verify_module
from shards.durable import read_json, write_json
from shards.errors import DataError
from shards.pack import PackOptions, pack
from shards.sample_index import NUMERIC, SampleIndex
from shards.verify import require_verified, verify
from tests.support.pictures import list_source


@pytest.fixture
def folder(tmp_path):
    pack(list_source(12), tmp_path / "packed", PackOptions(samples_per_shard=5))
    return tmp_path / "packed"


def _flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_good_folder_has_no_problems(folder, workers):
    report = verify(folder, workers)
    assert (report.samples, report.shards, report.problems) == (12, 3, [])


def test_a_flipped_byte_is_traced_to_its_sample(folder):
    index = SampleIndex.load(folder)
    _flip(folder / "shard-000001.tar", int(index.offset[7]) + 3)
    problems = verify(folder).problems
    assert problems == [
        "shard-000001.tar has changed since packing (SHA-256)",
        "shard-000001.tar: the bytes of sample 7 (k7) have changed (CRC-32)",
    ]
    with pytest.raises(DataError, match=r"shard-000001\.tar has changed .* incv shards pack list --split train"):
        require_verified(folder)


def test_a_missing_a_cut_and_a_swapped_shard_are_named(folder):
    (folder / "shard-000000.tar").unlink()
    os.truncate(folder / "shard-000001.tar", 700)
    shutil.copy(folder / "shard-000001.tar", folder / "shard-000002.tar")
    text = "\n".join(verify(folder).problems)
    assert "shard-000000.tar is missing" in text
    assert "shard-000001.tar has 700 bytes" in text
    assert "shard-000002.tar" in text
    with pytest.raises(DataError, match=r"shard-000000\.tar is missing"):
        require_verified(folder)


def test_every_cut_of_a_shard_is_found(folder):
    whole = (folder / "shard-000001.tar").read_bytes()
    for size in (0, 1, 511, 512, 513, 5000, len(whole) - 1):
        (folder / "shard-000001.tar").write_bytes(whole[:size])
        assert any("shard-000001.tar" in problem for problem in verify(folder).problems)


def test_a_changed_index_is_found(folder):
    with (folder / "index.arrow").open("rb") as file:
        place = file.read().index(SampleIndex.load(folder).crc32.tobytes())
    _flip(folder / "index.arrow", place)
    assert "checksum" in verify(folder).problems[0]


@pytest.mark.parametrize("name", ["dataset.json", "index.arrow", "index.parquet"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_a_broken_file_is_named_with_the_command_that_packs_again(folder, name, damage):
    path = folder / name
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(b"garbage" * 100)
    with pytest.raises(DataError, match=name):
        require_verified(folder)
    assert any(name in problem for problem in verify(folder).problems)


def test_dataset_json_is_not_trusted(folder):
    content = read_json(folder / "dataset.json")
    content["shards"][0]["file"] = "../../etc/passwd"
    write_json(folder / "dataset.json", content)
    with pytest.raises(DataError, match=r"dataset\.json has shard names"):
        SampleIndex.load(folder)
    write_json(folder / "dataset.json", {**content, "format": 9})
    with pytest.raises(DataError, match="format 9"):
        SampleIndex.load(folder)
    write_json(folder / "dataset.json", {"format": 1})
    with pytest.raises(DataError, match=r"dataset\.json"):
        SampleIndex.load(folder)


def test_the_full_check_is_made_once_until_a_file_changes(folder, monkeypatch):
    calls = []
    original = verify_module.verify
    monkeypatch.setattr(verify_module, "verify", lambda *a: calls.append(a) or original(*a))
    first = require_verified(folder)
    assert not calls  # packing has just taken the checksums
    (folder / ".verified.json").unlink()
    assert require_verified(folder).checksum == require_verified(folder).checksum == first.checksum
    assert len(calls) == 1
    os.utime(folder / "shard-000001.tar")
    require_verified(folder)
    require_verified(folder)
    assert len(calls) == 2
    _flip(folder / "shard-000001.tar", 600)
    for _ in range(2):  # a bad result is not remembered
        with pytest.raises(DataError, match="shard-000001"):
            require_verified(folder)
    _flip(folder / "shard-000001.tar", 600)
    assert require_verified(folder).checksum == first.checksum


def test_a_folder_that_cannot_be_written_is_checked_each_time(folder, monkeypatch):
    def refuse(path, content):
        raise DataError("read-only")

    (folder / ".verified.json").unlink()
    monkeypatch.setattr(verify_module, "write_json", refuse)
    require_verified(folder)
    assert not (folder / ".verified.json").exists()


def test_a_finished_pack_with_a_damaged_table_is_not_returned(folder):
    (folder / "duplicates.parquet").unlink()
    with pytest.raises(DataError, match=r"duplicates\.parquet"):
        pack(list_source(12), folder, PackOptions(samples_per_shard=5))


def test_the_index_is_mapped_read_only_and_travels_as_its_path(folder):
    index = SampleIndex.load(folder)
    for name, kind in NUMERIC.items():
        column = getattr(index, name)
        assert column.dtype == np.dtype(kind.to_pandas_dtype())
        assert not column.flags.writeable
        assert not column.flags.owndata
    copy = pickle.loads(pickle.dumps(index))
    assert len(pickle.dumps(index)) < 1000
    np.testing.assert_array_equal(copy.crc32, index.crc32)


def test_the_checksum_is_that_of_the_plain_integers_and_keys(folder):
    index = SampleIndex.load(folder)
    keys, digest = index.keys(), hashlib.sha256()
    for name, code in zip(NUMERIC, "qiqqiiibI", strict=True):
        digest.update(struct.pack(f"<12{code}", *getattr(index, name).tolist()))
    digest.update(struct.pack("<12I", *(len(key) for key in keys)))
    digest.update("".join(keys).encode())
    assert digest.hexdigest() == index.checksum


def test_the_checksum_does_not_depend_on_the_place(folder, tmp_path):
    moved = folder.rename(tmp_path / "elsewhere")
    assert not verify(moved).problems
    assert (
        SampleIndex.load(moved).checksum
        == pack(list_source(12), tmp_path / "b", PackOptions(samples_per_shard=5)).checksum
    )


def test_a_damaged_or_lost_side_table_is_named(folder):
    (folder / "rejected.parquet").write_bytes(b"junk")
    assert "rejected.parquet" in verify(folder).problems[0]
    with pytest.raises(DataError, match=r"rejected\.parquet"):
        require_verified(folder)
    pack(list_source(12), folder.parent / "again", PackOptions(samples_per_shard=5))
    (folder.parent / "again" / "duplicates.parquet").unlink()
    assert "duplicates.parquet" in verify(folder.parent / "again").problems[0]


def test_advice_loses_no_finished_work_and_names_no_other_path(tmp_path):
    half = tmp_path / "half done"
    (half / ".parts").mkdir(parents=True)
    (problem,) = verify(half).problems
    assert "rm -r" not in problem
    assert f"--out '{half}'" in problem
    pack(list_source(12), tmp_path / "small one", PackOptions(samples_per_shard=5, resize=12, quality=80))
    (tmp_path / "small one" / "shard-000001.tar").unlink()
    with pytest.raises(DataError) as refusal:
        require_verified(tmp_path / "small one")
    assert "rm -r" not in str(refusal.value)  # only that shard is to be written
    assert "Repair the damaged shards with its pack command: incv shards pack list" in str(refusal.value)
    assert "--classes 2 --resize 12 --quality 80" in str(refusal.value)


def test_a_damaged_index_cannot_be_mended(folder):
    _flip(folder / "index.arrow", -700)
    with pytest.raises(DataError, match=r"Pack it again: rm -r .* && incv shards pack list"):
        require_verified(folder)
