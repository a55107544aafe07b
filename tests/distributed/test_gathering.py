"""Gathered predictions and per-rank checkpoint state are bit-exact; invalid ones are refused on every rank."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.durable import read_json
from shards.errors import DataError
from tests.support import REPOSITORY
from tests.support.gathering_program import SPLITS, passed, rows, same_bits, statistics_of, task_in
from trainer.distributed.world import SINGLE_PROCESS
from trainer.incv.predictions import gather_predictions
from trainer.training.checkpoint import read_checkpoint, step_folder

PROGRAM = REPOSITORY / "tests" / "support" / "gathering_program.py"
RANKS = 3
Report = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gathering")


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[Report]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *torchrun, str(PROGRAM), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [read_json(folder / f"rank{rank}.json") for rank in range(RANKS)]
    assert [(report["heard"]["rank"], report["heard"]["size"]) for report in found] == [(0, 3), (1, 3), (2, 3)]
    return found


@pytest.mark.cluster
def test_rows_dealt_at_random_come_together_bit_for_bit(reports: list[Report]) -> None:
    """Ranks without rows, NaNs with a payload and negative zeros among them."""
    for report in reports:
        assert report["splits"] == [True] * SPLITS
        assert report["shared"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "1 are missing, 0 occur .* 0 do not belong"),
        ("twice by one", "0 are missing, 1 occur .* 0 do not belong"),
        ("twice by one instead of another", "1 are missing, 1 occur .* 0 do not belong"),
        ("by two", "0 are missing, 1 occur .* 0 do not belong"),
        ("foreign", "0 are missing, 0 occur .* 1 do not belong"),
        ("negative", "0 are missing, 0 occur .* 1 do not belong"),
        ("no rank has any", "20 are missing"),
        ("other columns", "the ranks have different columns"),
    ],
)
def test_every_rank_refuses(reports: list[Report], what: str, said: str) -> None:
    for report in reports:
        assert report["refusals"]["nothing wrong"] == "accepted"
        assert re.search(said, report["refusals"][what])


@pytest.mark.cluster
def test_a_pass_gives_the_table_of_one_process_on_every_rank(reports: list[Report], folder: Path) -> None:
    """Gathered, kept on the ranks, and with its features in a file; in one rank's share there may be nothing."""
    alone = passed(SINGLE_PROCESS, folder / "alone")
    assert set(alone) == {"23 gathered", "23 own", "23 file", "2 gathered", "2 own", "2 file"}
    for name, expected in alone.items():
        tables = [report["passed"][name] for report in reports]
        if name.endswith("own"):
            rows = [row for table in tables if table["ids"] for row in zip(*table.values(), strict=True)]
            tables = [dict(zip(expected, map(list, zip(*sorted(rows), strict=True)), strict=True))]
        assert all(table == expected for table in tables), name
    assert (folder / "features23").read_bytes() == (folder / "alone" / "features23").read_bytes()


@pytest.mark.cluster
def test_what_ranks_say_to_each_other(reports: list[Report]) -> None:
    for report in reports:
        heard = report["heard"]
        assert heard["sum"] == [3, 111]
        assert heard["mean"][0][0] == 1.0
        assert heard["mean"][1] == [[2.0]]
        assert heard["mean of equals"]
        assert heard["gathered"] == [[0.0, 0.0], [1.0, -1.0], [2.0, -2.0]]
        assert heard["gathered by first"] == (None if heard["rank"] else [[0, 7], [1, 7], [2, 7]])
        assert heard["shared"] == {"from": 0}
        assert heard["told"] == ["I am 0", "I am 1", "I am 2"]
        assert (heard["met, none wished"], heard["met, last wished"]) == (False, True)
        assert heard["different"] == (
            "the number differs between ranks: 0: 0, 1: 1, 2: 2. Check that all nodes have the same versions and see "
            "the same files, then run the same command again"
        )
        assert heard["agreed"] == [False, False, True, False]


@pytest.mark.cluster
def test_each_rank_finds_its_own_statistics_in_a_checkpoint(reports: list[Report]) -> None:
    statistics = [report["kept"]["statistics"] for report in reports]
    assert statistics[0] != statistics[1] != statistics[2]
    assert [report["kept"]["loaded"] for report in reports] == statistics
    assert all(report["kept"]["same draws"] for report in reports)


@pytest.mark.cluster
def test_a_checkpoint_of_many_ranks_has_one_entry_more(reports: list[Report]) -> None:
    alone = sorted(task_in(SINGLE_PROCESS).state().tensors)
    entries = [report["kept"]["entries"] for report in reports]
    assert entries == [sorted([*alone, "ranks.buffers"]), alone, alone]


@pytest.mark.cluster
def test_a_world_of_another_size_begins_with_the_mean(reports: list[Report], folder: Path) -> None:
    task = task_in(SINGLE_PROCESS)
    task.load(read_checkpoint(step_folder(folder / "checkpoints", 1)))
    for name, loaded in statistics_of(task).items():
        every = [report["kept"]["statistics"][name] for report in reports]
        np.testing.assert_allclose(loaded, np.mean(every, axis=0), rtol=1e-6)


def test_one_process_alone() -> None:
    ids = np.array([4, 7, 9], np.int64)
    whole = rows(ids, 0)
    assert same_bits(gather_predictions(SINGLE_PROCESS, [whole], ids[::-1]), whole)
    with pytest.raises(DataError, match=r"exactly once.*--redo incv"):
        gather_predictions(SINGLE_PROCESS, [whole], ids[:2])
