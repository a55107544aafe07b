"""A large index opens quickly and is shared between processes, by the benchmark that measures it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "index_scale.py"
FIELDS = {"name", "command", "value", "reference", "ratio", "runs", "spread", "machine", "date", "versions"}
ROWS, BYTES_A_ROW = 300_000, 45  # of index.arrow


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell how memory is shared")
    folder = tmp_path_factory.mktemp("index")
    options = ["--rows", str(ROWS), "--large", str(2 * ROWS), "--runs", "1", "--folder", str(folder)]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=True)
    assert not list(folder.iterdir())
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


def test_every_figure_has_every_field(lines):
    names = ["index_open_s", "index_open_large_s", "epoch_order_s", "epoch_order_large_s"]
    assert list(lines) == [*names, "index_pss_mb", "index_pss_increase_mb"]
    for name, line in lines.items():
        assert line.keys() - {"unit", "note"} == FIELDS
        assert (line["ratio"] is None) == (line["reference"] is None) == ("large" not in name)


def test_four_processes_hold_one_copy_of_the_index(lines):
    """Each has an order of its own, 8 bytes a row; four copies of the index would be three times the limit."""
    index, order = ROWS * BYTES_A_ROW / 1e6, ROWS * 8 / 1e6
    slack = 4 * 4.0  # dataset.json, and what the allocator keeps
    assert index <= lines["index_pss_increase_mb"]["value"] < index + 4 * order + slack < 4 * (index + order)


def test_opening_and_ordering_are_quick(lines):
    assert lines["index_open_s"]["value"] < 1.0
    assert lines["epoch_order_s"]["value"] < 1.0
