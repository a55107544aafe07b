"""True labels are for measuring only: wrong ones change neither weights nor selection."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.durable import write_parquet
from tests.support import RECIPES
from tests.support.untimed import untimed
from trainer.config.schema import Recipe
from trainer.incv.selection_index import SelectionIndex, State
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = RECIPES / "tiny.yaml"
METHODS = ("standard", "coteaching", "standard_incv", "coteaching_incv")
KEYS = (
    f"methods=[{', '.join(METHODS)}]",
    "data.train.limit=200",
    "incv.rounds=2",
    "incv.epochs=2",
    "standard.epochs=2",
    "coteaching.epochs=2",
    "coteaching_incv.warmup_epochs=1",
    "coteaching.ramp_epochs=1",
    "execution.threads=1",
    "execution.device=cpu",
)

# Paths of report.json that are measured against the truth.
MEASURED = (
    r"noise\.true",
    r"rounds\[\d+\]\.(label_precision|label_recall|removed_noise|theory(\..+)?)",
    r"selection\.(label_precision|label_recall|removed_noise|by_class\b.*)",
    r"(selection\.by_label|by_source)\[\d+\]\.wrong",
    r"confusion\.(prior|transition|predicted|pairs\.given|pairs\.predicted)\b.*",
    r"suspicious\[\d+\]\.true",
)
# Times, and that the second run was started twice.
OF_THE_START = (r"time_s\..+", r"pace\b.*", r"starts\b.*")


@pytest.fixture(scope="module")
def recipe(packed_digits: Path) -> Recipe:
    folders = [f"data.train.shards={packed_digits / 'train'}", f"data.eval.test.shards={packed_digits / 'test'}"]
    return load_recipe(TINY, [*KEYS, *folders])


@pytest.fixture(scope="module")
def runs(one_thread: None, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run left alone, and one whose true labels were shuffled as soon as they were written."""
    folder = tmp_path_factory.mktemp("truth")
    alone, shuffled = folder / "alone", folder / "shuffled"
    assert run_recipe(recipe, "tiny", alone) == 0
    assert run_recipe(recipe, "tiny", shuffled, only="labels") == 0
    shuffle_truth(shuffled / "true_labels.parquet")
    assert run_recipe(recipe, "tiny", shuffled) == 0
    return alone, shuffled


def shuffle_truth(path: Path) -> None:
    table = pq.read_table(path)
    labels = table["label"].to_numpy()
    other = np.random.default_rng(1).permutation(labels)
    assert (other != labels).mean() > 0.5
    columns = {"sample_id": table["sample_id"], "label": pa.array(other, table["label"].type)}
    write_parquet(path, pa.table(columns))


def weights_of(run: Path) -> dict[str, bytes]:
    """Every tensor file of the run: checkpoints of folds and methods, exported networks."""
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*.safetensors"))}


def test_all_weights_are_the_same(runs):
    alone, shuffled = (weights_of(run) for run in runs)
    assert alone.keys() == shuffled.keys()
    for training in ("rounds/0/fold0", "rounds/0/fold1", "rounds/1/fold0", "rounds/1/fold1"):
        assert any(name.startswith(f"{training}/checkpoints") for name in alone)
    for method in METHODS:
        assert any(name.startswith(f"methods/{method}/checkpoints") for name in alone)
        assert any(name.startswith(f"methods/{method}/export") for name in alone)
    assert [name for name in alone if alone[name] != shuffled[name]] == []


def test_the_selection_is_the_same(runs):
    alone, shuffled = (run / "selection.parquet" for run in runs)
    first, second = pq.read_table(alone), pq.read_table(shuffled)
    assert first.schema == second.schema
    for name in first.schema.names:
        np.testing.assert_array_equal(first[name].to_numpy(), second[name].to_numpy())
    index = SelectionIndex.read(alone)
    assert len(index.ids(State.SELECTED))
    assert len(index.ids(State.REMOVED))
    assert index.checksum() == SelectionIndex.read(shuffled).checksum()


def test_all_that_was_recorded_on_the_way_is_the_same(runs):
    alone, shuffled = runs
    names = ["incv.json", "evaluation.json", *(f"methods/{method}/training.json" for method in METHODS)]
    names += [str(path.relative_to(alone)) for path in alone.rglob("metrics.jsonl")]
    assert len(names) == 14
    for name in names:
        assert untimed(alone / name) == untimed(shuffled / name), name


def test_the_report_differs_only_in_what_is_measured_against_the_truth(runs):
    alone, shuffled = (json.loads((run / "report.json").read_text()) for run in runs)
    found = {path for path in differences(alone, shuffled) if not matches(path, OF_THE_START)}
    assert {path for path in found if not matches(path, MEASURED)} == set()
    # the shuffled truth was read, where it should be
    assert "noise.true" in found
    assert {f"rounds[{number}].label_precision" for number in (0, 1)} <= found
    assert any(path.startswith("confusion.transition") for path in found)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in patterns)


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """Paths at which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = set()
        for key in one.keys() | other.keys():
            inside = f"{path}.{key}".removeprefix(".")
            found |= differences(one[key], other[key], inside) if key in one and key in other else {inside}
        return found
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return set().union(
            *(differences(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(one, other, strict=True)))
        )
    return set() if one == other else {path}


def test_differences_are_found():
    one = {"a": [1, {"b": 2}], "c": None, "d": [1]}
    other = {"a": [1, {"b": 3}], "c": 0, "e": 1, "d": [1, 2]}
    assert differences(one, other) == {"a[1].b", "c", "e", "d"}
    assert differences(one, one) == set()
