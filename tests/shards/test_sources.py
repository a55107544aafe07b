"""The data sets: rows match the files, and no other input is trusted."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from shards.errors import ConfigError, DataError
from shards.image_check import MAX_BYTES, decode_rgb
from shards.pack import pack
from shards.sources import open_source
from shards.sources.source import list_names
from tests.support.pictures import FirstRows, image_tree, picture

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
ROWS = 10_000


@pytest.fixture(scope="module")
def cifar(tmp_path_factory) -> tuple[Path, np.ndarray, np.ndarray]:
    """Both official layouts of one made-up CIFAR-10; the five training files are links to one."""
    root = tmp_path_factory.mktemp("cifar")
    binary, python = root / "b" / "cifar-10-batches-bin", root / "p" / "cifar-10-batches-py"
    binary.mkdir(parents=True)
    python.mkdir(parents=True)
    (binary / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, ROWS, dtype=np.uint8)
    pixels = np.zeros((ROWS, 3072), np.uint8)
    pixels[:50] = rng.integers(0, 256, (50, 3072), dtype=np.uint8)
    np.concatenate([labels[:, None], pixels], axis=1).tofile(binary / "test_batch.bin")
    batch = {"data": pixels, "labels": labels.tolist(), "filenames": [b"x.png"] * ROWS, "batch_label": b"one"}
    _dump({"label_names": [name.encode() for name in NAMES], "num_vis": 3072}, python / "batches.meta")
    _dump({key.encode(): value for key, value in batch.items()}, python / "test_batch")
    for number in range(1, 6):
        os.link(binary / "test_batch.bin", binary / f"data_batch_{number}.bin")
        os.link(python / "test_batch", python / f"data_batch_{number}")
    return root, labels, pixels.reshape(ROWS, 3, 32, 32).transpose(0, 2, 3, 1)


def _dump(content: object, path: Path, protocol: int = 2) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol)


@pytest.mark.parametrize("place", ["b", "b/cifar-10-batches-bin", "p", "p/cifar-10-batches-py"])
def test_cifar10_gives_back_the_pixels_bit_for_bit(cifar, place):
    root, labels, pixels = cifar
    source = open_source("cifar10", root / place, "test")
    assert (len(source), source.class_names) == (ROWS, tuple(NAMES))
    for row in [0, 7, 49, ROWS - 1]:
        sample = source.sample(row)
        assert (sample.key, sample.label) == (f"cifar10/test/{row:05d}", labels[row])
        np.testing.assert_array_equal(decode_rgb(sample.data), pixels[row])


def test_both_versions_of_cifar10_pack_to_the_same_index(cifar, tmp_path):
    packed = [
        pack(FirstRows(open_source("cifar10", cifar[0] / place, "train"), 60), tmp_path / place) for place in "bp"
    ]
    assert packed[0].checksum == packed[1].checksum


def test_cifar10_train_runs_over_the_five_files_and_travels_light(cifar):
    source = open_source("cifar10", cifar[0] / "b", "train")
    assert len(source) == 5 * ROWS
    assert source.sample(3 * ROWS + 5).data == source.sample(5).data
    assert source.key(3 * ROWS + 5) == "cifar10/train/30005"
    assert source.origin(3 * ROWS + 5) == "data_batch_4.bin image 5"
    assert len(pickle.dumps(source)) < 10_000
    assert pickle.loads(pickle.dumps(source)).sample(5) == source.sample(5)


def test_cifar10_fit_and_validation_are_the_training_set_in_two_parts(cifar):
    train, fit, validation = (
        open_source("cifar10", cifar[0] / "b", split) for split in ("train", "fit", "validation")
    )
    assert (len(fit), len(validation), fit.class_names) == (45_000, 5_000, train.class_names)
    assert [*map(fit.key, range(45_000)), *map(validation.key, range(5_000))] == [*map(train.key, range(50_000))]
    assert [*map(fit.label, range(45_000)), *map(validation.label, range(5_000))] == [
        *map(train.label, range(50_000))
    ]
    assert validation.sample(7) == train.sample(45_007)
    assert fit.sample(44_999) == train.sample(44_999)
    assert validation.origin(7) == train.origin(45_007) == "data_batch_5.bin image 5007"
    with pytest.raises(IndexError):
        validation.key(5_000)


def test_cifar10_reads_pickles_of_python_2_and_column_major_arrays(tmp_path):
    """The official files were written by Python 2: byte strings are STRING opcodes, the array state too."""
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES))
    pixels = np.random.default_rng(1).integers(0, 256, (ROWS, 3072), dtype=np.uint8)
    python_2 = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01M\x10'M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x88T"
        + pixels.size.to_bytes(4, "little")
        + pixels.tobytes(order="F")
        + b"tbU\x06labels](" + b"K\x07" * ROWS + b"eu."
    )  # fmt: skip
    (tmp_path / "test_batch").write_bytes(python_2)
    source = open_source("cifar10", tmp_path, "test")
    assert source.label(9) == 7
    np.testing.assert_array_equal(decode_rgb(source.sample(9).data), pixels[9].reshape(3, 32, 32).transpose(1, 2, 0))


class _Payload:
    def __init__(self, call, *arguments) -> None:
        self.reduced = (call, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, protocol):
    mark = tmp_path / "mark"
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES))
    _dump({b"data": _Payload(os.mkdir, str(mark))}, tmp_path / "test_batch", protocol)
    with pytest.raises(DataError, match=r"test_batch is not a CIFAR-10 file: its pickle loads \w+\.mkdir"):
        open_source("cifar10", tmp_path, "test").label(0)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        {b"data": _Payload(eval, "1")},
        {b"data": _Payload(getattr, "", "join")},
        {b"data": np.zeros((ROWS, 3072), np.uint8), b"labels": [11] * ROWS},
        {b"data": np.zeros((ROWS, 10), np.uint8), b"labels": [1] * ROWS},
        {b"data": np.zeros((5, 3072), np.float32), b"labels": [1] * ROWS},
        {b"data": np.array([None]), b"labels": [1] * ROWS},
        {b"labels": [1] * ROWS},
        ["a list"],
    ],
)
def test_a_python_batch_that_is_not_cifar10_is_an_error_naming_it(tmp_path, content):
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES))
    _dump(content, tmp_path / "test_batch")
    with pytest.raises(DataError, match="test_batch"):
        open_source("cifar10", tmp_path, "test").sample(0)


def test_damaged_or_missing_cifar10_files_are_named(cifar, tmp_path):
    (tmp_path / "batches.meta.txt").write_text("\n".join(NAMES))
    (tmp_path / "test_batch.bin").write_bytes(b"\1" * 3073 * 9)
    with pytest.raises(DataError, match=r"test_batch\.bin has 27,657 bytes"):
        open_source("cifar10", tmp_path, "test")
    (tmp_path / "data_batch_1.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_2\.bin is missing"):
        open_source("cifar10", tmp_path, "train")
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch").write_bytes(b"\x80\x02}U\x03")
    with pytest.raises(DataError, match="test_batch cannot be read"):
        open_source("cifar10", tmp_path, "test").label(0)
    (tmp_path / "batches.meta.txt").write_text("cat dog")
    with pytest.raises(DataError, match=r"batches\.meta\.txt does not contain"):
        open_source("cifar10", tmp_path, "test")


def test_digits_are_real_split_in_a_fixed_stratified_way():
    train, test = open_source("digits", None, "train"), open_source("digits", None, "test")
    assert (len(train), len(test)) == (1397, 400)
    assert np.bincount([test.label(row) for row in range(400)]).tolist() == [40] * 10
    keys = [source.key(row).split("/")[-1] for source in (train, test) for row in range(len(source))]
    assert sorted(keys) == [f"{row:05d}" for row in range(1797)]
    assert [int(test.key(row)[-5:]) for row in range(8)] == [3, 10, 18, 21, 33, 40, 41, 48]


def test_digits_keep_their_16_gray_levels():
    from sklearn.datasets import load_digits

    source = open_source("digits", None, "train")
    sample = source.sample(12)
    row = int(sample.key[-5:])
    decoded = decode_rgb(sample.data)
    assert decoded.shape == (8, 8, 3)
    np.testing.assert_array_equal(decoded[:, :, 0], load_digits().images[row] * 15)
    assert sample.label == load_digits().target[row]
    assert pickle.loads(pickle.dumps(source)).sample(12) == sample


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'incv\[demo\]'"):
        open_source("digits", None, "train")


def test_an_image_folder_is_listed_in_order(tmp_path, caplog):
    root = image_tree(tmp_path / "root", classes=2, per_class=3)
    (root / "train/class0/deep").mkdir()
    (root / "train/class0/deep/x.JPEG").write_bytes(picture(kind="JPEG"))
    (root / "train/class0/0.png").write_bytes(picture())  # beside 0.jpg: one stem, two keys
    (root / "train/class0/notes.txt").write_text("no image")
    (root / "train/class0/._0.jpg").write_text("left by a Mac")
    source = open_source("image_folder", root, "train")
    keys = [source.key(row) for row in range(len(source))]
    assert keys == [
        *(f"train/class0/{name}" for name in ("0.jpg", "0.png", "1.png", "2.jpg", "deep/x.JPEG")),
        *(f"train/class1/{name}" for name in ("0.jpg", "1.png", "2.jpg")),
    ]
    assert [source.label(row) for row in range(8)] == [0] * 5 + [1] * 3
    assert source.class_names == ("class0", "class1")
    assert (source.sample(4).suffix, source.sample(4).data) == ("jpg", picture(kind="JPEG"))
    assert "2 files" in caplog.text


def test_an_image_folder_without_splits(tmp_path):
    source = open_source("image_folder", image_tree(tmp_path) / "train", "")
    assert source.key(0) == "class0/0.jpg"


def test_links_may_not_leave_the_root_nor_turn_back(tmp_path):
    root = image_tree(tmp_path / "root")
    (tmp_path / "secret.png").write_bytes(picture())
    link = root / "train/class1/link.png"
    link.symlink_to(root / "train/class0/1.png")
    source = open_source("image_folder", root, "train")
    assert "train/class1/link.png" in [source.key(row) for row in range(len(source))]
    for target in (tmp_path / "secret.png", "/etc/passwd", root / "nothing.png"):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(DataError, match=r"link\.png"):
            open_source("image_folder", root, "train")
    for target in (tmp_path, root / "train"):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(DataError, match=r"link\.png"):
            open_source("image_folder", root, "train")


def test_a_huge_file_is_not_read_whole(tmp_path):
    root = image_tree(tmp_path)
    with (root / "train/class0/0.jpg").open("r+b") as file:
        file.truncate(10 * MAX_BYTES)
    assert len(open_source("image_folder", root, "train").sample(0).data) == MAX_BYTES + 1


def test_an_empty_class_is_named(tmp_path):
    root = image_tree(tmp_path)
    (root / "train/empty").mkdir()
    with pytest.raises(DataError, match="train/empty contains no"):
        open_source("image_folder", root, "train")


def test_wrong_names_list_near_matches(tmp_path):
    with pytest.raises(ConfigError, match="did you mean cifar10"):
        open_source("cifar", None, "train")
    with pytest.raises(ConfigError, match="did you mean train"):
        open_source("digits", None, "trian")
    with pytest.raises(ConfigError, match="did you mean train"):
        open_source("image_folder", image_tree(tmp_path), "tran")
    with pytest.raises(ConfigError, match="no folder"):
        open_source("image_folder", tmp_path / "train", "..")


def test_the_first_classes_are_a_source_of_their_own(tmp_path):
    root = image_tree(tmp_path, classes=4, per_class=3)
    (root / "train/class0").rename(
        root / "train/x_last"
    )  # so that the classes kept are not the first rows of the disk
    whole, cut = (open_source("image_folder", root, "train", classes=count) for count in (None, 3))
    assert (cut.name, cut.split, cut.subset, cut.class_names) == ("image_folder", "train", "", whole.class_names[:3])
    rows = [row for row in range(len(whole)) if whole.label(row) < 3]
    for facts in ("key", "label", "origin", "sample"):
        assert [getattr(cut, facts)(row) for row in range(len(cut))] == [getattr(whole, facts)(row) for row in rows]
    assert pickle.loads(pickle.dumps(cut)).sample(5) == cut.sample(5)


def test_digits_cut_to_classes_keep_their_keys_in_order():
    whole, cut = open_source("digits", None, "test"), open_source("digits", None, "test", classes=4)
    assert len(cut) == 160
    assert [cut.key(row) for row in range(160)] == [whole.key(row) for row in range(400) if whole.label(row) < 4]
    assert open_source("digits", None, "test", classes=10).class_names == whole.class_names
    assert cut.origin(0).endswith("of scikit-learn's digits")
    for classes in (0, -1, 11):
        with pytest.raises(ConfigError, match=rf"--classes: digits has 10 classes, not {classes}"):
            open_source("digits", None, "test", classes=classes)


def test_subsets_are_for_sources_that_have_them():
    with pytest.raises(ConfigError, match=r"--subset: digits has no subsets.*leave it out"):
        open_source("digits", None, "train", subset="google")


@pytest.mark.parametrize("name", ["cifar10", "image_folder", "webvision"])
def test_a_missing_root_says_what_is_expected(name, tmp_path):
    for root in (None, tmp_path / "nowhere", tmp_path / "archive.tar.gz"):
        (tmp_path / "archive.tar.gz").touch()
        with pytest.raises(DataError, match="Expected there"):
            open_source(name, root, "train")


def test_names_of_folders_and_files_are_listed_apart(tmp_path):
    for name in ("b.jpg", "a.jpg", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "zebra").mkdir()
    (tmp_path / "ant").symlink_to(tmp_path / "zebra")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere")
    assert list_names(tmp_path) == (["ant", "zebra"], [".hidden", "a.jpg", "b.jpg", "gone.jpg"])
    for place in (tmp_path / "nowhere", tmp_path / "a.jpg"):
        with pytest.raises(DataError, match=rf"{place.name} cannot be read: .*Give yourself the permission"):
            list_names(place)
