"""Packing: the same bytes for any number of workers, safe under kills, nothing mixed up."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.errors import CommandStopped, ConfigError, DataError
from shards.image_check import VERDICTS, decode_rgb
from shards.pack import PackOptions, pack
from shards.plan import make_plan
from shards.sources import open_source
from shards.verify import verify
from tests.support import REPOSITORY
from tests.support.ordinary_user import ordinary_user
from tests.support.pictures import ListSource, contents, image_tree, list_source, picture

HTML = b"<html>not found</html>"


def test_the_index_says_where_every_image_lies(tmp_path):
    source = list_source(25)
    index = pack(source, tmp_path / "out", PackOptions(samples_per_shard=10))
    assert (len(index), index.num_classes, len(index.dataset.shards)) == (25, 2, 3)
    assert index.usable_ids().tolist() == list(range(25))
    assert index.keys() == [f"k{row}" for row in range(25)]
    assert index.keys(np.array([20, 3])) == ["k20", "k3"]
    for row in range(25):
        assert (index.shard[row], index.label[row]) == (row % 3, row % 2)  # shards are cut across the classes
        assert index.offset[row] % 512 == 0
        tar = index.shard_path(int(index.shard[row])).read_bytes()
        data = tar[index.offset[row] : index.offset[row] + index.nbytes[row]]
        assert data == source.sample(row).data
        assert zlib.crc32(data) == index.crc32[row]
        assert decode_rgb(data).shape == (index.height[row], index.width[row], 3)


@settings(max_examples=15, deadline=None)
@given(good=st.lists(st.booleans(), min_size=1, max_size=12), per_shard=st.integers(1, 13))
def test_rejected_rows_keep_their_id_and_are_in_no_shard(tmp_path_factory, good, per_shard):
    rows = [(f"k{row}", 0, picture(row, 4, 4) if ok else HTML) for row, ok in enumerate(good)]
    out = tmp_path_factory.mktemp("pack") / "out"
    index = pack(ListSource(rows), out, PackOptions(samples_per_shard=per_shard, max_rejected=1.0))
    assert index.sample_id.tolist() == list(range(len(good)))
    assert index.usable_ids().tolist() == [row for row, ok in enumerate(good) if ok]
    assert [VERDICTS[code] for code in index.verdict] == ["ok" if ok else "not_an_image" for ok in good]
    assert ((index.shard >= 0) == good).all()
    rejected = pq.read_table(out / "rejected.parquet").to_pylist()
    assert rejected == [
        {
            "sample_id": row,
            "key": f"k{row}",
            "verdict": "not_an_image",
            "origin": f"the list, entry {row}",
            "reason": "HTML bytes in a .png, not an image",
        }
        for row, ok in enumerate(good)
        if not ok
    ]


def test_one_and_two_workers_write_the_same_bytes(tmp_path):
    source = open_source("image_folder", image_tree(tmp_path / "root"), "train")
    one = pack(source, tmp_path / "one", PackOptions(samples_per_shard=4))
    two = pack(source, tmp_path / "two", PackOptions(samples_per_shard=4, workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert one.checksum == two.checksum


def test_webdataset_reads_the_shards(tmp_path):
    import webdataset

    source = open_source("image_folder", image_tree(tmp_path / "root"), "train")
    index = pack(source, tmp_path / "out", PackOptions(samples_per_shard=8))
    paths = [str(index.shard_path(shard)) for shard in range(3)]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False))
    rows = [int(sample["__key__"]) for sample in samples]
    assert rows == [row for shard in range(3) for row in range(shard, 21, 3)]
    for row, sample in zip(rows, samples, strict=True):
        raw = source.sample(row)
        assert sample[raw.suffix] == raw.data
        assert sample["__key__"] + "." + raw.suffix == f"{row:09d}.{raw.suffix}"


def test_tars_hold_plain_files_without_trace_of_time_or_user(tmp_path):
    index = pack(list_source(3), tmp_path / "out")
    with tarfile.open(index.shard_path(0)) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == [f"{row:09d}.png" for row in range(3)]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode, m.isreg()) for m in members} == {(0, 0, 0, "incv", 0o444, True)}


def test_a_finished_pack_is_returned_and_not_written_again(tmp_path):
    first = pack(list_source(), tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = pack(list_source(), tmp_path / "out")
    assert again.checksum == first.checksum
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert before.items() <= after.items()
    assert not (tmp_path / "out" / ".parts").exists()


@pytest.mark.parametrize("change", ["count", "listing", "samples_per_shard", "resize", "quality", "subset"])
@pytest.mark.parametrize("finished", [True, False])
def test_another_data_set_in_the_folder_is_refused(tmp_path, change, finished):
    if finished:
        pack(list_source(), tmp_path)
    else:
        with pytest.raises(CommandStopped):
            pack(list_source(), tmp_path, PackOptions(stop=lambda: True))
    other = list_source(11 if change == "count" else 10)
    if change == "listing":
        other.rows[3] = ("renamed", 0, picture())
    if change == "subset":
        other.subset = "flickr"
    options = {"samples_per_shard": 7, "resize": 32, "quality": 80}
    with pytest.raises(DataError, match=f"packed with (a different )?{change}"):
        pack(other, tmp_path, PackOptions(**{name: value for name, value in options.items() if name == change}))


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        pack(list_source(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_stopped_pack_goes_on_where_it_was(tmp_path):
    whole = pack(list_source(), tmp_path / "whole", PackOptions(samples_per_shard=3))
    polls = iter([False, False, True])
    with pytest.raises(CommandStopped):
        pack(list_source(), tmp_path / "out", PackOptions(samples_per_shard=3, stop=lambda: next(polls)))
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert len(tars) == 2
    before = [path.stat().st_mtime_ns for path in tars]
    index = pack(list_source(), tmp_path / "out", PackOptions(samples_per_shard=3))
    assert [path.stat().st_mtime_ns for path in tars] == before
    assert index.checksum == whole.checksum
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("lost", ["shard-000000.tar", ".parts/shard-000001.parquet"])
def test_a_shard_lost_between_two_starts_is_written_again(tmp_path, lost):
    polls = iter([False, False, True])
    with pytest.raises(CommandStopped):
        pack(list_source(), tmp_path / "out", PackOptions(samples_per_shard=3, stop=lambda: next(polls)))
    os.truncate(tmp_path / "out" / lost, 100)
    pack(list_source(), tmp_path / "out", PackOptions(samples_per_shard=3))
    pack(list_source(), tmp_path / "whole", PackOptions(samples_per_shard=3))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


SLOW_PACK = """
import sys, time
from pathlib import Path
from tests.support.pictures import ListSource, list_source
from shards.pack import PackOptions, pack

class Slow(ListSource):
    def sample(self, row):
        time.sleep(0.05)
        return super().sample(row)

if __name__ == "__main__":
    pack(Slow(list_source(60).rows), Path(sys.argv[1]), PackOptions(samples_per_shard=5, workers=2))
"""


def test_a_killed_pack_run_again_gives_the_same_bytes(tmp_path):
    script, out = tmp_path / "slow_pack.py", tmp_path / "out"
    script.write_text(SLOW_PACK)
    places = os.pathsep.join([str(REPOSITORY)])
    process = subprocess.Popen([sys.executable, str(script), str(out)], env={**os.environ, "PYTHONPATH": places})
    deadline = time.monotonic() + 60
    while len(list(out.glob(".parts/*.parquet"))) < 2 and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.3)  # workers see the end of their parent
    finished = [path.stem for path in out.glob(".parts/shard-*.parquet")]
    assert 2 <= len(finished) < 12
    before = {name: (out / f"{name}.tar").stat().st_mtime_ns for name in finished}
    pack(list_source(60), out, PackOptions(samples_per_shard=5))
    assert {name: (out / f"{name}.tar").stat().st_mtime_ns for name in finished} == before
    pack(list_source(60), tmp_path / "whole", PackOptions(samples_per_shard=5))
    assert contents(out) == contents(tmp_path / "whole")


def test_too_many_bad_images_are_an_error_that_lists_them(tmp_path):
    bomb = io.BytesIO()
    Image.new("1", (8000, 8000)).save(bomb, "PNG")
    rows = [(f"k{row}", 0, picture(row)) for row in range(20)]
    rows[2], rows[5] = ("page", 0, HTML), ("cut", 0, picture()[:-30])
    rows[6], rows[7] = ("empty", 0, b""), ("bomb", 0, bomb.getvalue())
    with pytest.raises(DataError) as caught:
        pack(ListSource(rows), tmp_path / "out", PackOptions(max_rejected=0.1))
    for text in (
        "at least 4",
        "page: HTML bytes in a .png, not an image",
        "cut: damaged or truncated PNG image",
        "empty: empty file",
        "bomb: larger than 64 MiB or 50 megapixels",
    ):
        assert text in str(caught.value)
    assert not (tmp_path / "out" / "dataset.json").exists()
    index = pack(ListSource(rows), tmp_path / "out", PackOptions(max_rejected=0.2))
    assert index.dataset.usable == 16


def test_bad_labels_and_double_keys_are_found_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match=r"k1 has label 2; the labels of list are 0\.\.1"):
        pack(ListSource([("k0", 0, b""), ("k1", 2, b"")]), tmp_path / "out")
    with pytest.raises(DataError, match="the key same"):
        pack(ListSource([("same", 0, b""), ("same", 1, b"")]), tmp_path / "out")
    with pytest.raises(DataError, match="no images"):
        pack(ListSource([]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class SameHash(str):
    __slots__ = ()

    def __hash__(self):
        return 7


def test_keys_that_only_look_the_same_are_told_apart():
    rows = [(SameHash(f"k{row}"), 0, b"") for row in range(50)]
    make_plan(ListSource(rows), 10, None, 90)
    rows[40] = (SameHash("k3"), 0, b"")
    with pytest.raises(DataError, match="the key k3: the list, entry 3 and the list, entry 40"):
        make_plan(ListSource(rows), 10, None, 90)


class ManyRows(ListSource):
    def __len__(self):
        return 100_000

    def key(self, row):
        return f"google/q0001/picture-{row:012d}.jpg"

    def label(self, row):
        return row % 2


def test_listing_a_large_source_keeps_no_keys():
    source = ManyRows([])
    tracemalloc.start()
    make_plan(source, 1000, 256, 90)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6e6  # the keys alone are 8.5e6


def test_numbers_out_of_range_are_refused(tmp_path):
    for options in ({"workers": 0}, {"samples_per_shard": 0}, {"max_rejected": 1.5}, {"resize": 0}, {"quality": 101}):
        with pytest.raises(ConfigError):
            pack(list_source(), tmp_path / "out", PackOptions(**options))


class KillsWorker(ListSource):
    def __setstate__(self, state):  # called where the source arrives: in a worker
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_is_an_error_not_a_hang(tmp_path):
    with pytest.raises(DataError, match=r"packing process was killed.*a smaller --workers"):
        pack(KillsWorker(list_source(8).rows), tmp_path / "out", PackOptions(workers=2, samples_per_shard=2))
    pack(list_source(8), tmp_path / "out", PackOptions(samples_per_shard=2))


def test_workers_ended_by_a_signal_to_the_whole_job_are_a_stop(tmp_path):
    polls = iter([False])
    with pytest.raises(CommandStopped):
        pack(
            KillsWorker(list_source(8).rows),
            tmp_path / "out",
            PackOptions(workers=2, samples_per_shard=2, stop=lambda: next(polls, True)),
        )


def test_a_finished_folder_may_be_read_only(tmp_path):
    """The usual shared data set: somebody else packed it."""
    out = tmp_path / "out"
    first = pack(list_source(12), out, PackOptions(samples_per_shard=5))
    out.chmod(0o555)
    with ordinary_user(out):
        again = pack(list_source(12), out, PackOptions(samples_per_shard=5))
    out.chmod(0o755)
    assert again.checksum == first.checksum


class VanishingList(ListSource):
    """A source that other processes cannot open any more."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise DataError("/data/info/train_filelist_google.txt has changed since it was read")


def test_what_a_worker_says_of_its_source_is_heard(tmp_path):
    with pytest.raises(DataError, match=r"train_filelist_google\.txt has changed"):
        pack(VanishingList(list_source(12).rows), tmp_path / "out", PackOptions(workers=2, samples_per_shard=3))


def test_a_stop_finishes_what_was_begun_and_no_more(tmp_path):
    def stop():
        return len(list((tmp_path / "out").glob("*.tar"))) >= 2

    with pytest.raises(CommandStopped):
        pack(list_source(60), tmp_path / "out", PackOptions(workers=2, samples_per_shard=3, stop=stop))
    assert 2 <= len(list((tmp_path / "out").glob("*.tar"))) <= 6


def test_damaged_shards_are_rewritten_and_no_others(tmp_path):
    out, source = tmp_path / "out", list_source(12)
    pack(source, out, PackOptions(samples_per_shard=3, dali_index=True))
    before = contents(out)
    whole = (out / "shard-000000.tar").stat()
    (out / "shard-000001.tar").unlink()
    (out / "shard-000002.tar").write_bytes(b"junk")
    index = pack(source, out, PackOptions(samples_per_shard=3))
    assert contents(out) == before
    assert (out / "shard-000000.tar").stat().st_mtime_ns == whole.st_mtime_ns
    assert not verify(index.folder).problems


def test_a_source_that_has_changed_repairs_nothing(tmp_path):
    out, rows = tmp_path / "out", list_source(12).rows
    pack(ListSource(rows), out, PackOptions(samples_per_shard=3))
    (out / "shard-000001.tar").write_bytes(b"junk")
    other = [(key, label, picture(99)) for key, label, _ in rows]
    with pytest.raises(DataError, match=r"shard-000001\.tar is damaged and cannot be repaired: list now gives"):
        pack(ListSource(other), out, PackOptions(samples_per_shard=3))
    assert (out / "shard-000001.tar").read_bytes() == b"junk"
    pack(ListSource(rows), out, PackOptions(samples_per_shard=3))
    assert not verify(out).problems
