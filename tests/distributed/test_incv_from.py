"""`--incv-from` with two processes: rank 0 copies, the other waits, and both train on the selection."""

from pathlib import Path

import pytest

from shards.durable import read_json
from tests.support import processes
from tests.support.command_line import contents
from tests.support.world_runs import Planned, launch, world_size

pytestmark = pytest.mark.cluster
SMALL = (
    "data.train.limit=100",
    "data.eval.test.limit=20",
    "incv.epochs=1",
    "incv.min_per_class=4",
    "batch.global=16",
)
TRAINED = (*SMALL, "methods=[coteaching_incv]", "coteaching_incv.epochs=2")


def test_two_ranks_train_on_the_selection_of_another_run(tmp_path: Path) -> None:
    processes.pack_digits(tmp_path)
    taken = (*TRAINED, "--incv-from", str(tmp_path / "first"))
    plan = [Planned("first", (*SMALL, "methods=[]")), Planned("own", TRAINED)]
    plan += [Planned("second", taken, stop=("coteaching_incv", 2)), Planned("second", TRAINED)]
    launch(tmp_path, 2, plan)
    assert world_size(tmp_path / "second") == 2
    found, expected = (contents(tmp_path / run) for run in ("second", "own"))
    parts = ("methods", "evaluation.json", "selection.parquet", "incv.json", "labels_review.csv")
    same = [path for path in expected if path.startswith(parts)]
    assert len(same) > 10
    assert [path for path in same if found[path] != expected[path]] == []
    starts = read_json(tmp_path / "second" / "manifest.json")["starts"]
    assert [start["ended"] for start in starts] == ["stopped", "finished"]
    assert not [steps for start in starts for steps in start["steps_executed"] if steps.startswith("incv")]
