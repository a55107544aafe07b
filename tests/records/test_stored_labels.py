"""The tables of labels of a run come back as they were written, dense by sample_id."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import DataError
from trainer.records.stored_labels import read_labels, write_labels

ROWS = st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 9), st.booleans()), min_size=1)


@given(ROWS, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_labels_come_back_dense_with_minus_1_where_the_run_has_none(rows, beyond):
    ids, samples = np.array(sorted(rows)), max(rows) + 1 + beyond
    checked = np.array([sample for sample, (_, by_hand) in sorted(rows.items()) if by_hand], np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.parquet"
        write_labels(path, ids, np.array([rows[sample][0] for sample in ids]), checked)
        stored = read_labels(path)
    assert stored.ids.tolist() == ids.tolist()
    assert stored.by_id(samples).tolist() == [rows.get(sample, (-1, False))[0] for sample in range(samples)]
    assert stored.checked_by_id(samples).tolist() == [rows.get(one, (-1, False))[1] for one in range(samples)]


def test_a_table_of_labels_that_were_not_checked_has_no_mark(tmp_path):
    write_labels(tmp_path / "labels.parquet", np.array([1, 4, 5]), np.array([7, 0, 2]))
    assert not read_labels(tmp_path / "labels.parquet").checked.any()


def test_a_torn_table_is_named(tmp_path):
    (tmp_path / "labels.parquet").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"labels\.parquet"):
        read_labels(tmp_path / "labels.parquet")
