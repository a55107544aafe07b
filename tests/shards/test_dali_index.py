"""DALI index files: DALI's own reader finds every image through them, and nothing else."""

import numpy as np
import pytest

from shards.dali_index import index_text
from shards.errors import DataError
from shards.pack import PackOptions, pack
from shards.sources import open_source
from shards.verify import require_verified, verify
from tests.support.pictures import ListSource, image_tree, list_source, picture


def _read_by_dali(tars: list[str], indices: list[str], suffix: str, count: int) -> list[bytes]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def reading():
        return fn.readers.webdataset(
            paths=tars, index_paths=indices, ext=[suffix], missing_component_behavior="skip", name="tars"
        )

    pipeline = reading()
    pipeline.build()
    assert pipeline.epoch_size("tars") == count
    return [np.asarray(pipeline.run()[0].at(0)).tobytes() for _ in range(count)]


@pytest.mark.parametrize("resize", [None, 12])
def test_dali_reads_what_was_packed(tmp_path, resize):
    source = open_source("image_folder", image_tree(tmp_path / "root"), "train")
    index = pack(source, tmp_path / "out", PackOptions(samples_per_shard=8, resize=resize, dali_index=True))
    tars = sorted(str(path) for path in (tmp_path / "out").glob("*.tar"))
    indices = sorted(str(path) for path in (tmp_path / "out").glob("*.idx"))
    assert [path.removesuffix(".idx") for path in indices] == [path.removesuffix(".tar") for path in tars]
    for suffix, mark in (("jpg", b"\xff\xd8"), ("png", b"\x89P")):
        expected = []
        for row in np.argsort(index.shard, kind="stable"):
            tar = index.shard_path(int(index.shard[row])).read_bytes()
            data = tar[index.offset[row] : index.offset[row] + index.nbytes[row]]
            expected += [data] if data.startswith(mark) else []
        if expected:
            assert _read_by_dali(tars, indices, suffix, len(expected)) == expected
    assert (resize is None) == bool(expected)  # resized, there is no PNG


def test_the_form_of_the_file(tmp_path):
    index = pack(list_source(2), tmp_path / "out")
    first, second = index.nbytes.tolist()
    offset = 512 + -(-first // 512) * 512 + 512
    assert index_text(index, 0) == f"v1.2 2\npng 512 {first} 000000000.png\npng {offset} {second} 000000001.png\n"


def test_an_empty_shard_has_no_index_file(tmp_path):
    rows = [(f"k{row}", 0, b"<html>" if row % 3 == 1 else picture(row)) for row in range(6)]
    pack(ListSource(rows), tmp_path / "out", PackOptions(samples_per_shard=2, max_rejected=1.0, dali_index=True))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.idx")) == ["shard-000000.idx", "shard-000002.idx"]
    assert not verify(tmp_path / "out").problems


def test_a_finished_pack_gets_its_index_files_later(tmp_path):
    pack(list_source(6), tmp_path / "out", PackOptions(samples_per_shard=2))
    assert not list((tmp_path / "out").glob("*.idx"))
    pack(list_source(6), tmp_path / "out", PackOptions(samples_per_shard=2, dali_index=True))
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.idx")}
    assert len(times) == 3
    pack(list_source(6), tmp_path / "out", PackOptions(samples_per_shard=2, dali_index=True))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.idx")} == times


def test_a_stale_or_missing_index_file_is_found_and_mended(tmp_path):
    out = tmp_path / "out"
    pack(list_source(6), out, PackOptions(samples_per_shard=2, dali_index=True))
    stale = out / "shard-000001.idx"
    whole = stale.read_text()
    stale.write_text(whole.replace(" 512 ", " 1024 "))
    assert verify(out).problems == [
        "shard-000001.idx does not match shard-000001.tar; `incv shards pack --dali-index` rewrites it"
    ]
    with pytest.raises(DataError, match=r"shard-000001\.idx"):
        require_verified(out)
    stale.unlink()
    assert verify(out).problems == [
        "shard-000001.idx is missing while other index files exist; `incv shards pack --dali-index` rewrites it"
    ]
    pack(list_source(6), out, PackOptions(samples_per_shard=2, dali_index=True))
    assert stale.read_text() == whole
    assert not verify(out).problems
