"""Tars read by their headers: the members that tarfile finds; unsafe, truncated or compressed tars are refused."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.errors import DataError
from shards.image_check import MAX_BYTES
from shards.sources.tar_members import FileState, TarImages, list_members, locate_members
from tests.support.ordinary_user import ordinary_user
from tests.support.webvision_tree import write_tar

_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0\\"), min_size=1, max_size=140).filter(
    lambda name: name not in (".", "..") and not name.lower().endswith((".pkl", ".pickle"))
)
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)
STYLES = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def built(path: Path, *members_of: tarfile.TarInfo, style: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=style) as tar:
        for member in members_of:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **facts: str) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.size = kind, size
    for key, value in facts.items():
        setattr(found, key, value)
    return found


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(_PATHS, st.binary(max_size=1100), max_size=5), st.sampled_from(STYLES[1:]))
@example({"a" * 100: b"1", "c" * 90 + "/" + "d" * 90: b"2"}, tarfile.USTAR_FORMAT)
@example({"é" * 60 + "/-x.jpg": b"1"}, tarfile.PAX_FORMAT)
def test_members_are_those_that_tarfile_finds(tmp_path_factory, files, style):
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_tar(path, files.items(), style)
    found = list(list_members(path))
    with tarfile.open(path) as tar:
        assert [(m.name, m.offset, m.nbytes) for m in found] == [(m.name, m.offset_data, m.size) for m in tar]
    content = path.read_bytes()
    assert [content[m.offset : m.offset + m.nbytes] for m in found] == list(files.values())


@pytest.mark.parametrize("style", STYLES)
def test_folders_are_passed_over_and_a_leading_dot_is_dropped(tmp_path, style):
    folder = member("./google/", tarfile.DIRTYPE)
    path = built(tmp_path / "a.tar", folder, member("./google/-a.jpg", size=700), member("b..jpg"), style=style)
    assert [(m.name, m.nbytes) for m in list_members(path)] == [("google/-a.jpg", 700), ("b..jpg", 0)]


def test_a_folder_that_claims_a_size_has_no_data(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(member("x/", tarfile.DIRTYPE, 4096).tobuf() + member("x/a.jpg").tobuf() + bytes(1024))
    assert [m.name for m in list_members(path)] == ["x/a.jpg"]


@pytest.mark.parametrize("place", [3, 110, 130, 150, 156, 300])
def test_a_header_with_a_changed_byte_is_refused(tmp_path, place):
    path = write_tar(tmp_path / "a.tar", [("first.jpg", b"1" * 600), ("second.jpg", b"2")])
    content = bytearray(path.read_bytes())
    content[512 + 1024 + place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.tar is damaged.* byte 1,536"):
        list(list_members(path))


def test_a_size_beyond_octal_is_read(tmp_path):
    """GNU tar writes sizes from 8 GiB on as binary numbers; a sparse file stands for such an image."""
    path, huge = tmp_path / "a.tar", 9 * 2**30
    header = member("a.jpg", size=huge)
    with path.open("wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.seek(512 + huge)
        file.write(member("b.jpg", size=3).tobuf() + b"abc".ljust(512, b"\0") + bytes(1024))
    assert [(m.name, m.nbytes) for m in list_members(path)] == [("a.jpg", huge), ("b.jpg", 3)]
    places = locate_members(path, {"a.jpg": 0, "b.jpg": 1})
    images = TarImages(path, places.state, places.offsets, places.nbytes)
    assert images.read(1, "b.jpg", "") == b"abc"
    assert len(images.read(0, "a.jpg", "")) == MAX_BYTES + 1  # and no more: enough to be found oversized


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (member("a/../../etc/passwd.jpg"), "leaves the folder"),
        (member("../a.jpg"), "leaves the folder"),
        (member("/etc/a.jpg"), "absolute path"),
        (member(".//etc/../a.jpg"), "leaves the folder"),
        (member("a.jpg", tarfile.SYMTYPE, linkname="/etc/passwd"), "is a link"),
        (member("a.jpg", tarfile.LNKTYPE, linkname="ok.jpg"), "is a hard link"),
        (member("a.jpg", tarfile.FIFOTYPE), "is a named pipe"),
        (member("a.jpg", tarfile.CHRTYPE), "is a device"),
        (member("a.jpg", b"S"), "a sparse file"),
        (member("a.jpg", b"Z"), "unknown type"),
        (member("labels.pkl"), "is a pickle"),
        (member("deep/LABELS.PICKLE"), "is a pickle"),
        (member("caf\udce9.jpg"), "not UTF-8"),
    ],
)
@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_dangerous_members_are_refused_even_where_no_list_names_them(tmp_path, bad, said, style):
    path = built(tmp_path / "a.tar", member("ok.jpg", size=5), bad, style=style)
    with pytest.raises(DataError, match=said) as refused:
        locate_members(path, {"ok.jpg": 0})
    assert str(path) in str(refused.value)


def _pax(records: bytes) -> bytes:
    return member("pax", tarfile.XHDTYPE, len(records)).tobuf() + records.ljust(-(-len(records) // 512) * 512, b"\0")


def _with_size(kind: bytes, nbytes: int) -> bytes:
    """A header whose size is a binary number, which may be negative."""
    info = member("a", kind, 8**11)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = nbytes.to_bytes(12, "big", signed=True)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "extra",
    [
        _pax(b"14 path=a\0bjpg\n"),
        _pax(b"19 path=../a.jpg_\n "),
        _pax(b"99999999 path=x\n"),
        _pax(b"0 path=x\n"),
        _pax(b"22 GNU.sparse.major=1\n"),
        _pax(b"18 size=999999999\n"),
        _pax(b"11 size=-5\n"),
        member("pax", tarfile.XGLTYPE, 10).tobuf() + b"10 path=a\n".ljust(512, b"\0"),
        member("long", tarfile.GNUTYPE_LONGNAME, 2**30).tobuf(),
        _pax(b"1" * 20_000),
        _pax(b"5 a=\n") * 3000,
        _pax(b"29 GNU.sparse.map=0,x,y,z,u,v\n"),
        _with_size(b"L", -1024),
        _with_size(b"0", -1024),
    ],
    ids=[
        "nul",
        "dots",
        "long",
        "zero",
        "sparse",
        "beyond",
        "negative",
        "global",
        "huge",
        "digits",
        "nested",
        "map",
        "minus name",
        "minus data",
    ],
)
def test_odd_attributes_are_refused_quickly(tmp_path, extra):
    path = tmp_path / "a.tar"
    path.write_bytes(extra + member("a.jpg").tobuf() + bytes(1024))
    start = time.monotonic()
    with pytest.raises(DataError, match=r"a\.tar"):
        list(list_members(path))
    assert time.monotonic() - start < 5


@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=700), st.integers(0, 2000), st.integers(0, 3))
def test_no_bytes_do_more_than_raise_a_data_error(tmp_path_factory, noise, place, stretch):
    path = write_tar(tmp_path_factory.mktemp("tar") / "a.tar", [("a" * 120, b"123"), ("b.jpg", b"x" * 600)])
    content = bytearray(path.read_bytes())
    content[place : place + len(noise) * stretch] = noise
    path.write_bytes(content)
    with suppress(DataError):
        list(list_members(path))


@given(cut=st.integers(0, 512 * 8))
@example(cut=512 + 1024)
@settings(deadline=None, max_examples=60)
def test_a_tar_cut_anywhere_is_an_error(tmp_path_factory, cut):
    path = write_tar(tmp_path_factory.mktemp("tar") / "a.tar", [("a.jpg", b"1" * 600), ("é" * 70, b"2" * 600)])
    whole = locate_members(path, {"a.jpg": 0, "é" * 70: 1})
    assert len(whole.missing()) == 0
    os.truncate(path, min(cut, int(whole.offsets[1]) + 1024))
    with pytest.raises(DataError, match=r"a\.tar is damaged, truncated"):
        locate_members(path, {"a.jpg": 0, "é" * 70: 1})


@pytest.mark.parametrize(
    ("packed", "program"),
    [
        (gzip.compress, "gzip"),
        (bz2.compress, "bzip2"),
        (lzma.compress, "xz"),
        (lambda data: b"\x28\xb5\x2f\xfd" + data, "zstd"),
    ],
)
def test_a_compressed_tar_says_how_to_unpack_it(tmp_path, packed, program):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1")])
    path.write_bytes(packed(path.read_bytes()))
    with pytest.raises(DataError, match=f"is compressed.*{program} -dc"):
        list(list_members(path))


def test_what_is_no_tar_is_named(tmp_path):
    path = tmp_path / "a.tar"
    for content in (b"<html>" * 500, b"\xff" * 5000, b"short"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.tar is damaged, truncated or not a tar"):
            list(list_members(path))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        list(list_members(path))
    path.mkdir()
    with pytest.raises(DataError, match="is not a regular file"):
        list(list_members(path))
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        list(list_members(path))


def test_a_tar_without_permission_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", []).chmod(0)
    with ordinary_user(tmp_path), pytest.raises(DataError, match="Permission denied"):
        list(list_members(tmp_path / "a.tar"))


def test_members_may_have_one_folder_more_or_leave_out_their_home(tmp_path):
    names = ["home/a.jpg", "x/home/b.jpg", "c.jpg", "x/y/home/d.jpg", "readme", ".DS_Store"]
    path = write_tar(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    places = locate_members(path, {f"home/{name}.jpg": row for row, name in enumerate("abcd")}, "home")
    assert places.missing().tolist() == [3]
    images = TarImages(path, places.state, places.offsets, places.nbytes)
    assert [images.read(row, "", "") for row in range(3)] == [b"home/a.jpg", b"x/home/b.jpg", b"c.jpg"]


def test_two_members_for_one_image_are_refused(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("x/a.jpg", b"3")])
    with pytest.raises(DataError, match=r"x/a\.jpg twice"):
        locate_members(path, {"a.jpg": 0})


def test_a_tar_that_changes_after_it_was_listed_is_not_read_on(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1" * 2000)])
    places = locate_members(path, {"a.jpg": 0})
    images = TarImages(path, places.state, places.offsets, places.nbytes)
    travelled = pickle.loads(pickle.dumps(images))
    assert images.read(0, "a.jpg", "list line 1") == b"1" * 2000
    os.truncate(path, 900)
    with pytest.raises(DataError, match=r"ends inside a\.jpg \(list line 1\)"):
        images.read(0, "a.jpg", "list line 1")
    with pytest.raises(DataError, match="has changed"):
        travelled.read(0, "a.jpg", "list line 1")


def test_a_hundred_thousand_places_travel_in_two_megabytes(tmp_path):
    count = 100_000
    images = TarImages(tmp_path / "a.tar", FileState(1, 1), np.arange(count), np.arange(count))
    assert len(pickle.dumps(images)) < 2_000_000
