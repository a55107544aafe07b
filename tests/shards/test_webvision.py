"""WebVision: the same rows from folders and from tars, and every mistake named by its file and line."""

import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError
from shards.image_check import MAX_BYTES
from shards.pack import PackOptions, pack
from shards.sources import RawSample, Source, open_source
from tests.support.ordinary_user import ordinary_user
from tests.support.pictures import contents
from tests.support.webvision_tree import SYNSETS, as_tars, picture_of, tar_of, webvision_tree, write_tar

GOOGLE, FLICKR, VAL = "info/train_filelist_google.txt", "info/train_filelist_flickr.txt", "info/val_filelist.txt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return webvision_tree(tmp_path / "webvision", google=12, flickr=6, val=5, classes=5)


def samples(source: Source) -> list[RawSample]:
    return [source.sample(row) for row in range(len(source))]


def listed(root: Path, path: str) -> list[tuple[str, int]]:
    lines = (root / path).read_text().splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def test_rows_are_those_of_the_lists_google_before_flickr(root):
    source = open_source("webvision", root, "train")
    wanted = listed(root, GOOGLE) + listed(root, FLICKR)
    assert (source.name, source.split, source.subset, len(source)) == ("webvision", "train", "all", 18)
    assert source.class_names == SYNSETS[:5]
    assert samples(source) == [
        RawSample(path.removesuffix(".jpg"), label, "jpg", (root / path).read_bytes()) for path, label in wanted
    ]
    assert [source.key(row) for row in range(18)] == [path.removesuffix(".jpg") for path, _ in wanted]
    assert [source.label(row) for row in range(18)] == [label for _, label in wanted]
    assert (source.origin(0), source.origin(17)) == (f"{GOOGLE} line 1", f"{FLICKR} line 6")
    assert source.key(2) == "google/q0001/-gO_00002"
    with pytest.raises(IndexError):
        source.key(18)


def test_subsets_are_parts_of_all(root):
    both = [samples(open_source("webvision", root, "train", subset)) for subset in ("google", "flickr")]
    assert both[0] + both[1] == samples(open_source("webvision", root, "train", "all"))
    assert open_source("webvision", root, "train", "flickr").subset == "flickr"


def test_val_has_keys_of_its_own_and_no_subset(root):
    source = open_source("webvision", root, "val")
    assert (source.subset, source.origin(4)) == ("", f"{VAL} line 5")
    assert samples(source)[0] == RawSample(
        "val/val000001", 0, "jpg", (root / "val_images_256/val000001.jpg").read_bytes()
    )
    with pytest.raises(ConfigError, match="val split of webvision has no subsets"):
        open_source("webvision", root, "val", "google")


def test_wrong_words_are_refused_with_near_matches(root):
    with pytest.raises(ConfigError, match="did you mean google"):
        open_source("webvision", root, "train", "gogle")
    with pytest.raises(ConfigError, match=r"no split 'test'.*train, val"):
        open_source("webvision", root, "test")


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1)
_ROWS = st.lists(
    st.tuples(st.integers(1, 3), _NAMES, st.sampled_from([".jpg", ".JPEG", ".Png"]), st.integers(0, 4)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[:2],
)


@example(
    google=[(1, "0", ".jpg", 0)],
    flickr=[(1, ".", ".jpg", 0)],  # the file `..jpg`
    prefix="",
    info="tar",
    style=tarfile.GNU_FORMAT,
    ending="\n",
)
@settings(deadline=None, max_examples=30)
@given(
    google=_ROWS,
    flickr=_ROWS,
    prefix=st.sampled_from(["", "./", "resized/", "./webvision/"]),
    info=st.sampled_from(["tar", "folder"]),
    style=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_folders_and_tars_give_the_same_rows(tmp_path_factory, google, flickr, prefix, info, style, ending):
    root = webvision_tree(tmp_path_factory.mktemp("tree") / "w", google=1, flickr=1, val=1, classes=5)
    for part, rows in (("google", google), ("flickr", flickr)):
        lines = []
        for query, name, suffix, label in rows:
            path = f"{part}/q{query:04d}/{name[:40]}{suffix}"
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(f"{path} {label}".encode())
            lines.append(f"{path} {label}")
        (root / f"info/train_filelist_{part}.txt").write_bytes(ending.join([*lines, ""]).encode())
    tars = as_tars(root, root.parent / "t", prefix, info, style)
    for split, subset in (("train", None), ("train", "google"), ("train", "flickr"), ("val", None)):
        folder, tar = open_source("webvision", root, split, subset), open_source("webvision", tars, split, subset)
        assert samples(folder) == samples(tar)
        assert all(folder.origin(row) == tar.origin(row) for row in range(len(folder)))
        assert folder.class_names == tar.class_names
        assert samples(pickle.loads(pickle.dumps(tar))) == samples(tar)
    train = open_source("webvision", root, "train")
    assert [train.sample(row).data.decode() for row in range(len(train))] == [
        f"{train.key(row)}{row_[2]} {row_[3]}" for row, row_ in enumerate(google + flickr)
    ]


def test_a_folder_comes_before_its_tar_and_lists_before_info_tar(root):
    tar_of(root / "google", root / "google_resized_256.tar", "google")
    tar_of(root / "info", root / "info.tar", "info")
    path = root / listed(root, GOOGLE)[0][0]
    path.write_bytes(b"changed")
    source = open_source("webvision", root, "train")
    assert (source.sample(0).data, source.origin(0)) == (b"changed", f"{GOOGLE} line 1")


def test_a_source_travels_light_and_reads_in_another_process(root, tmp_path):
    tars = as_tars(root, tmp_path / "tars")
    for place in (root, tars):
        source = open_source("webvision", place, "train", classes=3)
        source.sample(0)
        (tmp_path / "source").write_bytes(pickled := pickle.dumps(source))
        assert len(pickled) < 5_000
        read = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); print(s.sample(4).data.hex(), s.key(4))"
        found = subprocess.run([sys.executable, "-c", read, tmp_path / "source"], capture_output=True, text=True)
        assert found.stdout.split() == [source.sample(4).data.hex(), source.key(4)], found.stderr


def test_tars_may_be_links_to_where_they_are_kept(root, tmp_path):
    tars, links = as_tars(root, tmp_path / "tars"), tmp_path / "links"
    links.mkdir()
    for tar in tars.iterdir():
        (links / tar.name).symlink_to(tar)
    assert samples(open_source("webvision", links, "train")) == samples(open_source("webvision", root, "train"))


def test_folders_and_tars_pack_to_the_same_bytes(tmp_path):
    root = webvision_tree(tmp_path / "w", google=12, flickr=1, val=1, classes=5, plant={("google", 3): "html"})
    tars, packed = as_tars(root, tmp_path / "tars"), [tmp_path / "from_folders", tmp_path / "from_tars"]
    for place, out in zip((root, tars), packed, strict=True):
        source = open_source("webvision", place, "train", "google", classes=3)
        pack(source, out, PackOptions(samples_per_shard=3, max_rejected=0.2))
    assert contents(packed[0]) == contents(packed[1])


def test_a_list_that_changes_under_the_workers_is_not_read_on(root):
    pickled = pickle.dumps(open_source("webvision", root, "train"))
    with (root / FLICKR).open("a") as file:
        file.write("flickr/q0001/new.jpg 0\n")
    with pytest.raises(DataError, match=r"train_filelist_flickr\.txt has changed"):
        pickle.loads(pickled)


@pytest.mark.parametrize("form", ["folders", "tars"])
def test_planted_images_come_through_as_they_are(tmp_path, form):
    plant = {("google", 0): "truncated", ("flickr", 1): "html", ("google", 4): "empty"}
    root = webvision_tree(tmp_path / "w", google=5, flickr=5, val=1, plant=plant)
    source = open_source("webvision", root if form == "folders" else as_tars(root, tmp_path / "t"), "train")
    assert (source.sample(4).data, source.sample(6).data[:9]) == (b"", b"<!DOCTYPE")


def _rewrite(root: Path, path: str, line: int, content: bytes) -> None:
    lines = (root / path).read_bytes().split(b"\n")
    lines[line - 1] = content
    (root / path).write_bytes(b"\n".join(lines))


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"google/q0001/a.jpg", "number"),
        (b"google/q0001/a.jpg 1 ", "number"),
        (b"google/q0001/a.jpg x", "number"),
        (b"google/q0001/a.jpg -1", "number"),
        (b"google/q0001/a.jpg 1.0", "number"),
        (b"google/q0001/a.jpg 99999999999999999999", "number"),
        (b"", "number"),
        (b" 3", "number"),
        (b"google/q0001/a.jpg 5", r"label 5\b.*0\.\.4"),
        (b"google/../../etc/a.jpg 1", r"'\.\.' parts"),
        (b"google/q0001/./a.jpg 1", r"'\.\.' parts"),
        (b"google//a.jpg 1", r"'\.\.' parts"),
        (b"/etc/a.jpg 1", "google/"),
        (b"flickr/q0001/a.jpg 1", "google/"),
        (b"google/q0001/a.heic 1", r"\.jpg"),
        (b"google/q0001/.jpg 1", r"\.jpg"),
        (b"google/q0001/jpg 1", r"\.jpg"),
        (b"google/q0001/labels.pkl 1", r"\.jpg"),
        (b"google/q0001/caf\xe9.jpg 1", "not UTF-8"),
        (b"google/q0001/a\0.jpg 1", "a NUL byte"),
        (b"google/" + b"x" * 5000 + b".jpg 1", r"too long \(5,\d\d\d bytes\)"),
    ],
)
def test_a_bad_line_is_named(root, content, fact):
    _rewrite(root, GOOGLE, 7, content)
    with pytest.raises(DataError, match=rf"train_filelist_google\.txt line 7 .*{fact}") as refused:
        open_source("webvision", root, "train")
    assert len(str(refused.value)) < 600


def test_dots_and_absolute_paths_of_the_flat_list_are_named(root):
    for content in (b"../google/a.jpg 1", b"/etc/a.jpg 1", b"./val000001.jpg 1"):
        for line in (1, 3, 5):
            original = (root / VAL).read_bytes()
            _rewrite(root, VAL, line, content)
            with pytest.raises(DataError, match=rf"val_filelist\.txt line {line} .*'\.\.' parts"):
                open_source("webvision", root, "val")
            (root / VAL).write_bytes(original)


def test_a_bad_line_inside_info_tar_is_named_with_its_tar(root, tmp_path):
    _rewrite(root, FLICKR, 2, b"flickr/q0001/a.jpg 7")
    with pytest.raises(DataError, match=r"info\.tar: info/train_filelist_flickr\.txt line 2 .*label 7"):
        open_source("webvision", as_tars(root, tmp_path / "tars"), "train")


def test_an_image_listed_twice_is_named_with_both_lines(root):
    path = listed(root, FLICKR)[1][0]
    for repeated in (path, path.replace(".jpg", ".png")):
        _rewrite(root, FLICKR, 5, f"{repeated} 0".encode())
        with pytest.raises(DataError, match=r"train_filelist_flickr\.txt line 5 .*the same image as line 2"):
            open_source("webvision", root, "train")


def test_of_several_repeated_images_the_first_is_named(root):
    numbers = [*range(20), *reversed(range(20))]
    (root / FLICKR).write_text("".join(f"flickr/q0001/{number}.jpg 0\n" for number in numbers))
    with pytest.raises(DataError, match=r"line 21 .*the same image as line 20"):
        open_source("webvision", root, "train")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_list_is_an_error(root, content):
    (root / VAL).write_bytes(content)
    with pytest.raises(DataError, match=r"info/val_filelist\.txt in .* is empty"):
        open_source("webvision", root, "val")
    (root / "info/synsets.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"synsets\.txt"):
        open_source("webvision", root, "train")


def test_bad_lines_of_synsets_are_named(root):
    _rewrite(root, "info/synsets.txt", 3, b"great white shark")
    with pytest.raises(DataError, match=r"info/synsets\.txt line 3 .*expected a WordNet id"):
        open_source("webvision", root, "train")
    _rewrite(root, "info/synsets.txt", 3, SYNSETS[0].encode())
    with pytest.raises(DataError, match=r"info/synsets\.txt line 3 .*the same class as line 1"):
        open_source("webvision", root, "train")


def test_lists_written_elsewhere_are_read_alike(root):
    before = samples(open_source("webvision", root, "val"))
    content = (root / VAL).read_bytes()
    for other in (content.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + content, content.rstrip(), content + b"\n\n"):
        (root / VAL).write_bytes(other)
        assert samples(open_source("webvision", root, "val")) == before


def test_missing_lists_and_images_say_what_was_looked_for(root, tmp_path):
    for root_given in (None, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"Expected there: info/.*google_resized_256\.tar"):
            open_source("webvision", root_given, "train")
    os.rename(root / "google", root / "elsewhere")
    with pytest.raises(DataError, match=r"neither google/ nor google_resized_256\.tar"):
        open_source("webvision", root, "train")
    assert len(open_source("webvision", root, "train", "flickr")) == 6  # which needs nothing of google's
    (root / "google_resized_256.tar.gz").touch()
    with pytest.raises(DataError, match=r"google_resized_256\.tar\.gz must be decompressed"):
        open_source("webvision", root, "train")
    (root / GOOGLE).unlink()
    with pytest.raises(DataError, match=r"no info/train_filelist_google\.txt, neither as a file nor in info\.tar"):
        open_source("webvision", root, "train")
    tar_of(root / "info", root / "info.tar", "info")
    with pytest.raises(DataError, match=r"no info/train_filelist_google\.txt, neither as a file nor in info\.tar"):
        open_source("webvision", root, "train")


def test_unreadable_images_are_named_with_their_line(root, tmp_path):
    source = open_source("webvision", root, "train")
    paths = [root / path for path, _ in listed(root, GOOGLE)]
    paths[0].unlink()
    with pytest.raises(DataError, match=rf"same0\.jpg \({GOOGLE} line 1\) is missing"):
        source.sample(0)
    paths[0].mkdir()
    with pytest.raises(DataError, match=r"line 1\) is not a regular file"):
        source.sample(0)
    paths[1].unlink()
    os.mkfifo(paths[1])
    with pytest.raises(DataError, match=r"line 2\) is not a regular file"):
        source.sample(1)
    (tmp_path / "secret.jpg").write_bytes(picture_of(0, 0))
    for target in (tmp_path / "secret.jpg", Path("/etc/passwd")):
        paths[2].unlink()
        paths[2].symlink_to(target)
        with pytest.raises(DataError, match=r"line 3\) is behind a link that leaves"):
            source.sample(2)
    paths[2].unlink()
    paths[2].symlink_to(paths[3])
    assert source.sample(2).data == paths[3].read_bytes()
    paths[3].unlink()
    paths[3].symlink_to(paths[3])
    with pytest.raises(DataError, match=r"line 4\) cannot be read: Too many levels"):
        source.sample(3)
    with paths[4].open("r+b") as file:
        file.truncate(2 * MAX_BYTES)
    assert len(source.sample(4).data) == MAX_BYTES + 1


def test_a_whole_folder_behind_a_link_that_leaves_is_refused(root, tmp_path):
    os.rename(root / "google", tmp_path / "google")
    (root / "google").symlink_to(tmp_path / "google")
    with pytest.raises(DataError, match="link that leaves"):
        open_source("webvision", root, "train").sample(0)
    os.rename(root / "info", tmp_path / "info")
    (root / "info").symlink_to(tmp_path / "info")
    with pytest.raises(DataError, match=r"synsets\.txt is behind a link that leaves"):
        open_source("webvision", root, "train")


def test_files_without_permission_are_named(root):
    source = open_source("webvision", root, "train")
    (root / listed(root, GOOGLE)[0][0]).chmod(0)
    with ordinary_user(root), pytest.raises(DataError, match=r"line 1\) cannot be read: Permission denied"):
        source.sample(0)
    (root / GOOGLE).chmod(0)
    with (
        ordinary_user(root),
        pytest.raises(DataError, match=r"train_filelist_google\.txt cannot be read: Permission denied"),
    ):
        open_source("webvision", root, "train")


def test_folders_in_place_of_files_are_named(root, tmp_path):
    tars = as_tars(root, tmp_path / "tars")
    (tars / "google_resized_256.tar").unlink()
    (tars / "google_resized_256.tar").mkdir()
    with pytest.raises(DataError, match=r"google_resized_256\.tar is not a regular file"):
        open_source("webvision", tars, "train")
    (root / GOOGLE).unlink()
    (root / GOOGLE).mkdir()
    with pytest.raises(DataError, match=r"train_filelist_google\.txt is not a regular file"):
        open_source("webvision", root, "train")


def test_a_tar_that_lacks_images_is_refused_when_opened(root, tmp_path):
    path, _ = listed(root, GOOGLE)[3]
    (root / path).unlink()
    tars = as_tars(root, tmp_path / "tars")
    with pytest.raises(DataError, match=rf"lacks 1 of the 12 listed images; the first is {path} \(info/\S+ line 4\)"):
        open_source("webvision", tars, "train")
    assert len(open_source("webvision", tars, "train", "flickr")) == 6


def test_a_tar_cut_off_at_any_place_is_refused(root, tmp_path):
    tars = as_tars(root, tmp_path / "tars")
    tar = tars / "flickr_resized_256.tar"
    with tarfile.open(tar) as archive:
        third = archive.getmembers()[2]
    whole = tar.read_bytes()
    for size in (third.offset, third.offset + 100, third.offset_data, third.offset_data + third.size - 1, 0):
        tar.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"flickr_resized_256\.tar is damaged, truncated"):
            open_source("webvision", tars, "train")


def test_stray_files_in_a_tar_are_ignored_and_pickles_are_not(root, tmp_path):
    tars, val = as_tars(root, tmp_path / "tars"), root / "val_images_256"
    images = [(f"val_images_256/{file.name}", file.read_bytes()) for file in sorted(val.iterdir())]
    strays = [("val_images_256/.DS_Store", b"x"), ("readme.txt", b"x"), ("a/b/c/other.jpg", b"x")]
    write_tar(tars / "val_images_256.tar", strays + images)
    assert samples(open_source("webvision", tars, "val")) == samples(open_source("webvision", root, "val"))
    write_tar(tars / "val_images_256.tar", [*images, ("cache.pkl", b"x")])
    with pytest.raises(DataError, match=r"cache\.pkl' is a pickle"):
        open_source("webvision", tars, "val")


def test_the_images_of_val_may_lie_in_no_folder(root, tmp_path):
    tars = as_tars(root, tmp_path / "tars")
    write_tar(
        tars / "val_images_256.tar",
        [(file.name, file.read_bytes()) for file in sorted((root / "val_images_256").iterdir())],
    )
    assert samples(open_source("webvision", tars, "val")) == samples(open_source("webvision", root, "val"))


def test_many_rows_open_fast(tmp_path):
    """244,000 lines, a tenth of the real lists, in a few seconds even on a busy machine."""
    root = webvision_tree(tmp_path / "w", google=1, flickr=1, val=1)
    lines = [
        f"google/q{row // 150:04d}/{row * 7919 % 999983:014d}x{row}.jpg {row // 24400}" for row in range(244_000)
    ]
    (root / GOOGLE).write_text("\n".join(lines))
    measured = (
        "import re, sys, time; from pathlib import Path; from shards.sources import open_source;"
        "start = time.process_time(); source = open_source('webvision', Path(sys.argv[1]), 'train', 'google');"
        "peak = re.search('VmHWM: *\\t* *([0-9]+)', Path('/proc/self/status').read_text())[1];"
        "print(len(source), time.process_time() - start, int(peak) // 1024)"
    )
    found = subprocess.run([sys.executable, "-c", measured, root], capture_output=True, text=True, check=True)
    count, seconds, megabytes = (float(word) for word in found.stdout.split())
    assert (count, seconds < 4.0, megabytes < 300) == (244_000, True, True), found.stdout


def test_members_may_lack_the_folder_that_the_list_names(root, tmp_path):
    """google_resized_256.tar of q0001/x.jpg instead of google/q0001/x.jpg."""
    folders, tars = open_source("webvision", root, "train"), tmp_path / "tars"
    as_tars(root, tars)
    for part in ("google", "flickr"):
        for prefix in ("", "./"):
            files = sorted(file for file in (root / part).rglob("*") if file.is_file())
            members = ((f"{prefix}{f.relative_to(root / part).as_posix()}", f.read_bytes()) for f in files)
            write_tar(tars / f"{part}_resized_256.tar", members)
            found = open_source("webvision", tars, "train")
            assert [found.sample(row) for row in range(len(found))] == [
                folders.sample(row) for row in range(len(folders))
            ]
