"""CSV files: what a spreadsheet would run is escaped, and every text comes back."""

import csv
import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.csv_file import escape_texts, unescape_cell, write_csv

FORMULA = "=+-@\t\r\n"
texts = st.text(st.one_of(st.sampled_from(FORMULA + "'\",; a"), st.characters(exclude_categories=["Cs"])), max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, max_size=8))
def test_no_cell_starts_a_formula_and_every_text_comes_back(values):
    escaped = escape_texts(pa.table({"text": pa.array(values, pa.string())}))["text"].to_pylist()
    assert not any(cell.startswith(tuple(FORMULA)) for cell in escaped)
    assert [unescape_cell(cell) for cell in escaped] == values


@settings(max_examples=30, deadline=None)
@given(st.lists(texts, min_size=1, max_size=8))
def test_a_written_file_is_read_by_python(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    write_csv(path, pa.table({"text": pa.array(values, pa.string()), "number": range(len(values))}))
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["text", "number"]
    assert [(unescape_cell(text), int(number)) for text, number in rows] == list(
        zip(values, range(len(values)), strict=True)
    )


def test_harmless_texts_numbers_and_nulls_are_left_alone(tmp_path: Path):
    path = tmp_path / "table.csv"
    table = pa.table({"text": ["'tis", None, "a=b"], "number": [-1.5, None, 2.0], "issue": [True, False, None]})
    write_csv(path, table)
    assert path.read_text() == '"text","number","issue"\n"\'tis",-1.5,true\n,,false\n"a=b",2,\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_is_an_error_with_its_number():
    """`shards.durable` tells a full disk from other errors by the number."""
    with pytest.raises(OSError, match="No space left") as caught:
        pyarrow.csv.write_csv(pa.table({"text": ["a"]}), "/dev/full")
    assert caught.value.errno == errno.ENOSPC
