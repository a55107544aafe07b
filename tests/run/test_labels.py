"""The labels of a run: corruption follows T alone, and label files are validated."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shards.errors import ConfigError, DataError
from shards.pack import PackOptions, pack
from shards.sample_index import SampleIndex
from shards.sources import RawSample
from tests.support import RECIPES
from trainer.config.data import LabelsConfig
from trainer.loading.sample_order import derive_stream
from trainer.run.label_file import file_checksum, read_label_file
from trainer.run.labels import (
    build_transition,
    corrupt_labels,
    make_labels,
    require_every_class,
)
from trainer.run.recipe import load_recipe
from trainer.run.result_keys import result_keys
from trainer.theory import asymmetric_transition, symmetric_transition

GENERAL = ((0.5, 0.3, 0.2), (0.0, 0.9, 0.1), (0.25, 0.0, 0.75))


class TwelveImages:
    """Three classes of four; the image of row 5 is broken, so that its id is in the index and in no run."""

    name, split, subset, class_names = "twelve", "train", "", ("ant", "bee", "cow")

    def __len__(self) -> int:
        return 12

    def key(self, row: int) -> str:
        return f"{self.class_names[self.label(row)]}/picture, {row}" if row == 7 else f"photo/{row:02d}"

    def label(self, row: int) -> int:
        return row % 3

    def origin(self, row: int) -> str:
        return f"row {row}"

    def sample(self, row: int) -> RawSample:
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (20 * row, 0, 0)).save(stream, "PNG")
        data = b"no image" if row == 5 else stream.getvalue()
        return RawSample(self.key(row), self.label(row), "png", data)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return pack(TwelveImages(), tmp_path_factory.mktemp("twelve") / "shards", PackOptions(max_rejected=0.1))


@pytest.fixture
def label_file(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "annotations.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def by_key(index: SampleIndex, labels: list[object], header: str = "", leave_out: tuple[int, ...] = ()) -> str:
    """A CSV of all keys, quoted, in falling order of ids: the order of a file by key must not matter."""
    rows = [f'"{key}",{label}' for key, label in zip(index.keys(), labels, strict=True)]
    kept = [row for sample_id, row in enumerate(rows) if sample_id not in leave_out]
    return header + "\n".join(reversed(kept)) + "\n"


GIVEN = [2, 1, 0, 0, 1, 2, 2, 2, 1, 1, 0, 0]


# --- corruption


def transitions() -> list[tuple[str, np.ndarray]]:
    return [
        ("symmetric 0.5", symmetric_transition(0.5, 10)),
        ("symmetric 0.2", symmetric_transition(0.2, 3)),
        ("pair flip 0.4", asymmetric_transition(0.4, 10)),
        ("matrix", np.array(GENERAL)),
    ]


@pytest.mark.parametrize(("name", "transition"), transitions(), ids=[name for name, _ in transitions()])
def test_realised_transitions_are_those_of_t(name, transition):
    classes, count = len(transition), 60_000
    true = np.random.default_rng(0).integers(0, classes, count)
    noisy = corrupt_labels(true, np.arange(count), transition, derive_stream(0, "labels"))
    assert noisy.dtype == np.int64
    for label, expected in enumerate(transition):
        drawn = noisy[true == label]
        shares = np.bincount(drawn, minlength=classes) / len(drawn)
        errors = np.sqrt(expected * (1 - expected) / len(drawn))
        assert (np.abs(shares - expected) <= 4 * errors).all(), f"class {label}: {shares}"


def test_draws_of_neighbouring_ids_and_seeds_are_independent():
    """The flips of two seeds, and of ids one apart, coincide as often as chance says."""
    count, transition = 40_000, symmetric_transition(0.5, 10)
    true, ids = np.zeros(count, np.int64), np.arange(count)
    flips = [corrupt_labels(true, ids, transition, derive_stream(seed, "labels")) != 0 for seed in (0, 1)]
    error = math.sqrt(0.25 / count)
    assert abs((flips[0] == flips[1]).mean() - 0.5) < 4 * error
    assert abs((flips[0][1:] == flips[0][:-1]).mean() - 0.5) < 4 * error


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 10**7), min_size=1, max_size=60, unique=True), st.data())
def test_a_draw_depends_on_the_id_and_the_seed_alone(seed, ids, data):
    """A subset in another order gets the same labels: neither the row nor the other samples matter."""
    ids = np.array(ids)
    labels = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids))))
    whole = corrupt_labels(labels, ids, np.array(GENERAL), derive_stream(seed, "labels"))
    some = np.array(data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, unique=True)))
    part = corrupt_labels(labels[some], ids[some], np.array(GENERAL), derive_stream(seed, "labels"))
    np.testing.assert_array_equal(part, whole[some])


def test_ratio_0_changes_nothing_and_1_everything():
    labels, ids = np.arange(5000) % 10, np.arange(5000)
    for make in (symmetric_transition, asymmetric_transition):
        np.testing.assert_array_equal(corrupt_labels(labels, ids, make(0.0, 10), 3), labels)
        assert (corrupt_labels(labels, ids, make(1.0, 10), 3) != labels).all()
    np.testing.assert_array_equal(corrupt_labels(labels, ids, asymmetric_transition(1.0, 10), 3), (labels + 1) % 10)


def test_labels_stay_in_range_where_a_row_sums_to_a_little_less_than_1():
    """As rounded decimals of a recipe may: a draw above the sum must not fall off the end."""
    transition = np.full((7, 7), 1 / 7) * 0.99
    labels = corrupt_labels(np.arange(70_000) % 7, np.arange(70_000), transition, 1)
    assert labels.min() == 0
    assert labels.max() == 6


def config(**keys: object) -> LabelsConfig:
    return LabelsConfig(**keys)


def test_the_source_is_not_corrupted_without_noise(index):
    ids = index.usable_ids()
    given_labels, true = make_labels(config(), 0, index, ids)
    np.testing.assert_array_equal(given_labels, ids % 3)
    assert true is None  # nobody has said that the source is right
    np.testing.assert_array_equal(make_labels(config(source_is_true=True), 0, index, ids)[1], ids % 3)
    assert 5 not in ids


@pytest.mark.parametrize(
    "keys",
    [
        {"noise": "symmetric", "ratio": 0.5},
        {"noise": "asymmetric", "ratio": 0.5},
        {"noise": "matrix", "matrix": GENERAL},
    ],
)
def test_noise_leaves_the_truth_alone_and_follows_its_seed(index, keys):
    ids = index.usable_ids()
    noisy, true = make_labels(config(**keys), 4, index, ids)
    np.testing.assert_array_equal(true, ids % 3)
    assert (noisy != true).any()
    for same in (make_labels(config(**keys), 4, index, ids), make_labels(config(**keys, seed=4), 9, index, ids)):
        np.testing.assert_array_equal(same[0], noisy)
    others = [make_labels(config(**keys), seed, index, ids)[0] for seed in (5, 6, 7)]
    assert any((other != noisy).any() for other in others)


def test_a_limited_run_has_the_labels_of_the_whole(index):
    keys = {"noise": "symmetric", "ratio": 0.6}
    whole, _ = make_labels(config(**keys), 0, index, index.usable_ids())
    some = index.usable_ids()[[8, 1, 4]]
    np.testing.assert_array_equal(make_labels(config(**keys), 0, index, some)[0], whole[[8, 1, 4]])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"noise": "symmetric", "ratio": 0.3}, symmetric_transition(0.3, 3)),
        ({"noise": "asymmetric", "ratio": 0.3}, asymmetric_transition(0.3, 3)),
        ({"noise": "pair_flip", "ratio": 0.3}, asymmetric_transition(0.3, 3)),
        ({"noise": "symmetric_inclusive", "ratio": 0.3}, [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]]),
        ({"noise": "matrix", "matrix": GENERAL}, np.array(GENERAL)),
    ],
)
def test_the_transition_of_a_recipe(keys, expected):
    found = build_transition(config(**keys), 3)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (((0.5, 0.5, 0.1), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)), "row 0"),
        (((1.0, 0.0, 0.0), (0.0, 0.9, 0.0), (0.0, 0.0, 1.0)), "row 1"),
        (((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.5, -0.5, 0.0)), "row 2"),
        (((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (math.nan, 0.0, 1.0)), "row 2"),
        (((1.0, 0.0), (0.0, 1.0)), "3 rows of 3"),
        (((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), "3 rows of 3"),
        (((1.0, 0.0, 0.0), (0.0, 1.0), (0.0, 0.0, 1.0)), "3 rows of 3"),
        ((), "3 rows of 3"),
    ],
    ids=["above 1", "below 1", "negative", "nan", "too small", "a row short", "ragged", "empty"],
)
def test_a_matrix_that_is_no_transition_is_a_mistake_of_the_recipe(index, matrix, says):
    wrong = config(noise="matrix", matrix=matrix)
    with pytest.raises(ConfigError, match=rf"labels\.matrix.*{says}"):
        build_transition(wrong, 3)
    with pytest.raises(ConfigError, match=r"labels\.matrix"):
        make_labels(wrong, 0, index, index.usable_ids())


def test_a_single_class_cannot_be_noisy():
    for keys in ({"noise": "symmetric", "ratio": 0.3}, {"noise": "matrix", "matrix": ((1.0,),)}):
        with pytest.raises(ConfigError, match="at least 2 classes"):
            build_transition(config(**keys), 1)


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_similar_classes_of_cifar10_are_confused():
    matrix = build_transition(config(noise="similar_class", ratio=0.4), 10, CIFAR10)
    assert matrix is not None
    flips = {(CIFAR10[i], CIFAR10[j]): matrix[i, j] for i, j in np.argwhere(matrix > 0) if i != j}
    assert set(flips) == {
        ("truck", "automobile"), ("bird", "airplane"), ("deer", "horse"), ("cat", "dog"), ("dog", "cat"),
    }  # fmt: skip
    np.testing.assert_allclose(list(flips.values()), 0.4)
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)


def test_similar_classes_are_known_for_cifar10_only(index):
    confused = config(noise="similar_class", ratio=0.4)
    for classes, names in ((10, [str(digit) for digit in range(10)]), (3, None)):
        with pytest.raises(ConfigError, match=r"similar_class is defined for the classes airplane, .*labels\.matrix"):
            build_transition(confused, classes, names)
    with pytest.raises(ConfigError, match="similar_class"):
        make_labels(confused, 0, index, index.usable_ids())


def test_another_name_of_a_kind_leaves_the_result_keys_alone():
    given = [load_recipe(RECIPES / "tiny.yaml", [f"labels.noise={name}"]) for name in ("asymmetric", "pair_flip")]
    assert result_keys(given[0]) == result_keys(given[1])
    assert result_keys(given[0])["labels.noise"] == "asymmetric"


# --- label files


@pytest.mark.parametrize("header", ["", "key,label\n", "Key, Label\n"], ids=["no header", "header", "loose header"])
def test_a_csv_by_key_with_or_without_a_header(index, label_file, header):
    """Also with a key that holds a comma, and for the rejected sample."""
    found = read_label_file(label_file(by_key(index, GIVEN, header)), index)
    assert found.tolist() == GIVEN
    assert found.dtype == np.int64


def test_one_label_a_line_in_the_sources_order(index, label_file):
    path = label_file("\n".join(f" {label}" for label in GIVEN) + "\n\n")
    assert read_label_file(path, index).tolist() == GIVEN


@pytest.mark.parametrize("text", ["by_key", "by_line"])
def test_a_run_trains_on_the_file_and_is_measured_against_the_source(index, label_file, text):
    content = by_key(index, GIVEN) if text == "by_key" else "\n".join(map(str, GIVEN))
    ids = index.usable_ids()[::-2]
    labels, true = make_labels(config(file=str(label_file(content)), source_is_true=True), 0, index, ids)
    np.testing.assert_array_equal(labels, np.array(GIVEN)[ids])
    np.testing.assert_array_equal(true, ids % 3)
    assert make_labels(config(file=str(label_file(content))), 0, index, ids)[1] is None


@pytest.mark.parametrize("keys", [{}, {"noise": "symmetric", "ratio": 0.4}])
def test_a_source_that_is_not_the_truth_leaves_none(index, keys):
    ids = index.usable_ids()
    labels, true = make_labels(config(source_is_true=False, **keys), 0, index, ids)
    assert true is None
    np.testing.assert_array_equal(labels, make_labels(config(**keys), 0, index, ids)[0])


def test_missing_keys_are_counted_and_named(index, label_file):
    with pytest.raises(DataError, match=r"annotations\.csv lacks 2 of 12 keys.*photo/03.*photo/10"):
        read_label_file(label_file(by_key(index, GIVEN, leave_out=(3, 10))), index)


@pytest.mark.parametrize("header", ["", "key,label\n"])
def test_an_unknown_key_is_named(index, label_file, header):
    with pytest.raises(DataError, match="photo/99"):
        read_label_file(label_file(by_key(index, GIVEN, header) + "photo/99,1\n"), index)


def test_a_key_given_twice_is_named_even_with_the_same_label(index, label_file):
    with pytest.raises(DataError, match=r"photo/04.*twice"):
        read_label_file(label_file(by_key(index, GIVEN) + f"photo/04,{GIVEN[4]}\n"), index)


@pytest.mark.parametrize("label", [3, -1, 1000])
@pytest.mark.parametrize("kind", ["by_key", "by_line"])
def test_a_label_outside_the_classes_is_named_with_its_key(index, label_file, kind, label):
    labels = [*GIVEN[:6], label, *GIVEN[7:]]
    text = by_key(index, labels) if kind == "by_key" else "\n".join(map(str, labels))
    with pytest.raises(DataError, match=rf"label {label} of 'photo/06' is outside 0\.\.2"):
        read_label_file(label_file(text), index)


@pytest.mark.parametrize("label", [2**31, 2**63, -(2**80)])
def test_a_label_too_large_for_the_table_is_no_class_number(index, label_file, label):
    labels = [*GIVEN[:6], label, *GIVEN[7:]]
    with pytest.raises(DataError, match=r"line 7: .* is neither a class number"):
        read_label_file(label_file("\n".join(map(str, labels))), index)
    with pytest.raises(DataError, match=r"line 6: .* is neither a class number"):
        read_label_file(label_file(by_key(index, labels)), index)


@pytest.mark.parametrize("label", ["1.0", "cat", "0x1", "nan", "1e0", "0_1", "١"])
def test_what_is_no_integer_is_named_with_its_row(index, label_file, label):
    labels = [*GIVEN[:6], label, *GIVEN[7:]]
    with pytest.raises(DataError, match=rf"line 7: '{label}'"):
        read_label_file(label_file("\n".join(map(str, labels))), index)
    with pytest.raises(DataError, match=rf"line 6: '{label}'"):  # the CSV is written from the last id on
        read_label_file(label_file(by_key(index, labels)), index)


def test_an_empty_label_is_named_with_its_row(index, label_file):
    with pytest.raises(DataError, match="line 12"):
        read_label_file(label_file(by_key(index, ["", *GIVEN[1:]])), index)


def test_a_row_of_other_than_two_cells_is_named(index, label_file):
    with pytest.raises(DataError, match=r"line 1: expected key,label"):
        read_label_file(label_file("photo/00,1,0.9\n"), index)


@pytest.mark.parametrize("labels", [GIVEN[:-1], [*GIVEN, 0], []])
def test_a_wrong_number_of_lines_is_refused_with_both_numbers(index, label_file, labels):
    with pytest.raises(DataError, match=rf"{len(labels)} labels, but the data set has 12 samples"):
        read_label_file(label_file("\n".join(map(str, labels))), index)


def test_a_file_that_cannot_be_read_is_named(index, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        read_label_file(tmp_path / "nowhere.csv", index)
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        file_checksum(tmp_path / "nowhere.csv", "labels.file")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(DataError, match=r"binary\.csv"):
        read_label_file(binary, index)


def test_the_files_checksum_is_of_its_content(label_file):
    first = file_checksum(label_file("a,1\n"), "labels.file")
    assert file_checksum(label_file("a,2\n"), "labels.file") != first
    assert file_checksum(label_file("a,1\n"), "labels.file") == first


# --- classes and files


def test_a_class_without_a_sample_is_named():
    names = ("ant", "bee", "cow", "dog")
    require_every_class(np.array([3, 2, 1, 0, 0]), names)
    with pytest.raises(DataError, match=r"1 class.*1 \(bee\)"):
        require_every_class(np.array([0, 2, 3]), names)
    with pytest.raises(DataError, match=r"2 class.*2 \(cow\), 3 \(dog\)"):
        require_every_class(np.array([0, 1]), names)


def test_a_mark_of_a_spreadsheet_and_blank_lines_are_passed_over(index, label_file):
    marked = "\ufeff" + by_key(index, GIVEN).replace("\n", "\n\n")
    assert read_label_file(label_file(marked), index).tolist() == GIVEN
    assert read_label_file(label_file("\ufeff" + "\n".join(map(str, GIVEN))), index).tolist() == GIVEN


def test_an_endless_cell_is_an_error_of_the_file(index, label_file):
    with pytest.raises(DataError, match="line 13"):
        read_label_file(label_file(by_key(index, GIVEN).rstrip() + "\n" + "x" * 200_000 + ",1"), index)


def test_a_label_may_be_a_class_by_name(index, label_file):
    names = [index.class_names[label] for label in GIVEN]
    assert read_label_file(label_file(by_key(index, names)), index).tolist() == GIVEN
    assert read_label_file(label_file("\n".join(names)), index).tolist() == GIVEN


def test_an_unknown_key_is_answered_with_known_ones(index, label_file):
    with pytest.raises(DataError, match=r"no key 'filename'; keys look like 'photo/00'.*must be key,label"):
        read_label_file(label_file("filename,class\n" + by_key(index, GIVEN)), index)
