"""Which INCV stages fit a run: the keys that decide, whatever was overridden, and logs that are adopted once."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import RECIPES
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.records.unreadable import UnreadableLog, parse_complete_lines
from trainer.run.ledger import StageLedger
from trainer.run.recipe import load_recipe
from trainer.run.stage_graph import stage_keys

READ_BY_INCV = {
    "seed=5": "seed",
    "labels.ratio=0.1": "labels.ratio",
    "incv.rounds=3": "incv.rounds",
    "incv.optimizer.learning_rate=0.5": "incv.optimizer.learning_rate",
    "image.flip=true": "image.flip",
    "precision=bf16": "precision",
    "data.train.limit=200": "data.train.limit",
}
NOT_READ = (
    "coteaching.epochs=9",
    "coteaching_incv.epochs=9",
    "standard.epochs=9",
    "methods=[coteaching_incv]",
    "evaluation.every=1",
    "data.eval.test.limit=7",
    "execution.log_every=9",
)
FACTS = {"data.train.checksum": "aaaa", "data.eval.test.checksum": "bbbb"}


@settings(max_examples=12, deadline=None)
@given(st.sets(st.sampled_from(sorted(READ_BY_INCV))), st.sets(st.sampled_from(NOT_READ)), st.booleans())
def test_the_keys_that_incv_reads_decide(read: set[str], other: set[str], other_images: bool) -> None:
    record: dict[str, Any] = {"keys": stage_keys(load_recipe(RECIPES / "tiny.yaml"), FACTS)["incv"]}
    facts = {**FACTS, "data.eval.test.checksum": "cccc", "data.train.checksum": "dddd" if other_images else "aaaa"}
    recipe, run = load_recipe(RECIPES / "tiny.yaml", [*read, *other]), RunDirectory(Path("nowhere"))
    changes = StageLedger(recipe, facts, run, Manifest(run)).compare("incv", record)
    expected = {READ_BY_INCV[override] for override in read} | ({"data.train.checksum"} if other_images else set())
    assert {change.partition(" ")[0] for change in changes} == expected


lines = st.builds(
    lambda sample, stage, fold: {
        "sample_id": sample,
        "key": str(sample),
        "split": "train",
        "stage": stage,
        "doing": "training",
        "round": 0,
        "fold": fold,
    },
    st.integers(0, 3),
    st.sampled_from(["incv", "standard"]),
    st.integers(0, 1),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(lines), st.lists(lines))
def test_each_line_is_adopted_once_and_own_lines_stay(
    own: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> None:
    with TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        UnreadableLog(run, 0).adopt(own)
        for _ in range(2):
            UnreadableLog(run, 0).adopt(theirs)
        path = run.unreadable(0)
        found = list(parse_complete_lines(path.read_bytes())) if path.exists() else []
    each_once = [line for position, line in enumerate(own + theirs) if line not in (own + theirs)[:position]]
    assert found == each_once
