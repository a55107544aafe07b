"""`labels.corrections`: what a file may look like, what it changes, and what is wrong with it."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.csv_file import write_csv
from shards.errors import DataError
from shards.pack import pack
from shards.sample_index import SampleIndex
from tests.support.pictures import ListSource, picture
from trainer.run.label_file import EXCLUDED, Corrections, read_corrections, read_label_file
from trainer.run.labels import overlay_corrections

AWKWARD = ("=1+1", "'=1+1", "'tis", " spaced ", "two\nlines", "-5", "k\u2028ey", 'say "x"', "\tt", "a, b")
KEYS = ("plain", *AWKWARD, "päd")
NAMES = ("ant", "=bee", " cow", "dog, small")


class Awkward(ListSource):
    class_names = NAMES


class Numbered(ListSource):
    class_names = ("1", "2", "10")


def packed(source: type[ListSource], folder: Path) -> SampleIndex:
    rows = [(key, row % len(source.class_names), picture(row)) for row, key in enumerate(KEYS)]
    return pack(source(rows), folder / "shards")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return packed(Awkward, tmp_path_factory.mktemp("awkward"))


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    return packed(Numbered, tmp_path_factory.mktemp("numbered"))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def written(text: str) -> Path:
        path = tmp_path / "mended.csv"
        path.write_bytes(text.encode())
        return path

    return written


def corrected(path: Path, index: SampleIndex) -> dict[str, int]:
    found = read_corrections(path, index)
    return dict(zip(index.keys(found.ids), found.labels.tolist(), strict=True))


# --- what a file may look like


@pytest.mark.parametrize(
    "text",
    [
        "plain,3\npäd,\n",
        "key,label\nplain,3\npäd,\n",
        "\ufeffKey, Label\r\nplain, 3 \r\n\r\npäd,  \r\n",
        "key;label\nplain;dog, small\npäd;\n",
        "key\tother\tlabel\nplain\tx\t3\npäd\ty\t\n",
        "sample_id,LABEL,key\n0,3,plain\n7,,päd\n",
        '"key","label"\n"plain","dog, small"\n"päd",""\n,\n',
        "key,given_label,label\nplain,ant,3\npäd,,\n",
        "key,given_label,corrected_label\nplain,ant,3\npäd,,\n",
        "key,given_label\nplain,3\npäd,\n",
    ],
)
def test_forms_of_a_file(index, file, text):
    assert corrected(file(text), index) == {"plain": 3, "päd": EXCLUDED}


def test_a_written_label_or_a_mark_vouches_for_the_label(index, file):
    text = (
        "key,given_label,corrected_label,checked\nplain,ant,ant,\npäd,ant,,\n=1+1,ant,,TRUE\n-5,ant,,no\n'tis,,,x\n"
    )
    found = read_corrections(file(text), index)
    vouched = dict(zip(index.keys(found.ids), found.vouched.tolist(), strict=True))
    assert vouched == {"plain": True, "päd": False, "=1+1": True, "-5": False, "'tis": False}  # that one is excluded
    assert read_corrections(file("plain,ant\npäd,\n"), index).vouched.tolist() == [True, False]
    with pytest.raises(DataError, match=r"line 2: 'perhaps' in the column `checked`: write true"):
        read_corrections(file("key,label,checked\nplain,ant,perhaps\n"), index)


def test_a_misspelt_class_gets_a_suggestion(index, file):
    with pytest.raises(DataError, match=r"'Annt', .* did you mean 'ant'\? classes are"):
        read_corrections(file("plain,Annt\n"), index)


def test_an_empty_added_column_leaves_the_given_label(index, file):
    text = "key,given_label,corrected_label\nplain,ant,\npäd,,\n"
    assert corrected(file(text), index) == {"plain": 0, "päd": EXCLUDED}


def test_rows_of_images_that_are_gone_matter_only_with_a_decision(index, file):
    header = "key,given_label,corrected_label,checked\nplain,ant,3,\n"
    assert corrected(file(header + "gone,ant,,\n"), index) == {"plain": 3}
    for decided in ("gone,ant,3,\n", "gone,ant,,true\n", "gone,,,\n"):
        with pytest.raises(DataError, match=r"no key 'gone'.*delete its row"):
            corrected(file(header + decided), index)
    with pytest.raises(DataError, match="no key 'gone'"):  # not the list: the label itself is the decision
        corrected(file("key,given_label\nplain,3\ngone,ant\n"), index)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), st.sampled_from([None, *range(len(NAMES))]), min_size=1))
def test_a_list_that_we_write_comes_back(tmp_path_factory, index, labels):
    """Whatever keys and class names hold: commas, quotes, line breaks, formulas, spaces."""
    path = tmp_path_factory.mktemp("list") / "labels_review.csv"
    names = [None if label is None else NAMES[label] for label in labels.values()]
    table = {"loss": range(len(names)), "key": list(labels), "given_label": pa.array(names, pa.string())}
    write_csv(path, pa.table(table))
    expected = {key: EXCLUDED if label is None else label for key, label in labels.items()}
    assert corrected(path, index) == expected


def test_escaped_keys_are_accepted_by_a_label_file_too(index, tmp_path):
    path = tmp_path / "labels.csv"
    labels = [NAMES[row % 4] for row in range(len(KEYS))]
    write_csv(path, pa.table({"key": list(KEYS), "label": labels}))
    assert read_label_file(path, index).tolist() == [row % 4 for row in range(len(KEYS))]


def test_unescaped_keys_are_accepted(index, file):
    written = io.StringIO()
    csv.writer(written).writerows([key, 1] for key in KEYS if key != "'=1+1")  # that one reads as =1+1, escaped
    assert corrected(file(written.getvalue()), index) == {key: 1 for key in KEYS if key != "'=1+1"}


def test_classes_named_by_other_numbers_are_known_by_name_alone(numbered, file):
    assert corrected(file("plain,1\npäd,10\n-5,2\n"), numbered) == {"plain": 0, "päd": 2, "-5": 1}
    with pytest.raises(DataError, match=r"line 1: '0', .* is not a class name.*classes are 1, 2, 10"):
        read_corrections(file("plain,0\n"), numbered)


# --- what is wrong with it


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plain,1\nno/such,1\n", r"line 2: the data set has no key 'no/such'; keys look like 'plain'"),
        ("plain,1\n\nplain,2\n", r"line 3: key 'plain' occurs twice, first on line 1"),
        (
            "key,label\nplain,emu\n",
            r"line 2: 'emu', the label of 'plain', is neither a class number",
        ),
        ("plain,4\n", r"line 1: label 4 of 'plain' is outside 0\.\.3"),
        ("plain,-1\n", r"line 1: label -1 of 'plain' is outside 0\.\.3"),
        ("plain\n", r"line 1: expected key,label, found 'plain'"),
        ("plain,1,2\n", r"line 1: expected key,label"),
        ("key,label,path\nplain,1\n", r"line 2: expected the 3 cells of the header"),
        ("file,class\nplain,1\n", r"line 1: the data set has no key 'file'.*header.*key,label"),
        ('key,label\nplain,1\n"päd,1\n-5,2\n', r"line 3: not valid CSV"),
        ('"two\nlines",1\npäd,emu\n', r"line 3: 'emu'"),
        ("", r"has no rows: write key,label, or set labels\.corrections to null"),
        ("key,label\n", r"has no rows"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(index, file, text, says):
    with pytest.raises(DataError, match=rf"labels\.corrections .*mended\.csv.*{says}"):
        read_corrections(file(text), index)


def test_a_file_that_cannot_be_read_is_named(index, tmp_path):
    with pytest.raises(DataError, match=r"labels\.corrections .*nowhere\.csv cannot be read"):
        read_corrections(tmp_path / "nowhere.csv", index)
    (tmp_path / "list.parquet").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(DataError, match=r"list\.parquet cannot be read.*Save it as CSV in UTF-8"):
        read_corrections(tmp_path / "list.parquet", index)
    with pytest.raises(DataError, match=r"cannot be read"):
        read_corrections(tmp_path, index)


# --- what it changes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_overlay_changes_the_samples_it_names_and_no_other(data):
    ids = np.array(sorted(data.draw(st.sets(st.integers(0, 40)))), np.int64)
    labels = np.array([data.draw(st.integers(0, 3)) for _ in ids], np.int64)
    changes = data.draw(st.dictionaries(st.integers(0, 40), st.integers(EXCLUDED, 3)))
    vouched = [label != EXCLUDED and data.draw(st.booleans()) for label in changes.values()]
    corrections = Corrections(
        np.array(list(changes), np.int64), np.array(list(changes.values()), np.int64), np.array(vouched, bool)
    )
    before = labels.copy()
    found, checked = overlay_corrections(labels, ids, corrections)
    expected = [changes.get(number, label) for number, label in zip(ids.tolist(), before.tolist(), strict=True)]
    assert found.tolist() == expected
    confirmed = {number for number, sure in zip(changes, vouched, strict=True) if sure}
    for number, old, new, known in zip(ids.tolist(), before, expected, checked.tolist(), strict=True):
        assert known == (new != EXCLUDED and (new != old or number in confirmed))
    np.testing.assert_array_equal(labels, before)
