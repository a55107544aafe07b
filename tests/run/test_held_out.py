"""`data.eval_fraction`: a stratified split that training never sees, and that is predicted, listed and evaluated."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import RECIPES, processes
from tests.support.command_line import exit_code
from trainer.incv.predictions import Predictions
from trainer.incv.selection_index import SelectionIndex, State
from trainer.run.labels import split_held_out

labels_of = st.lists(st.integers(0, 6), min_size=1, max_size=200).map(lambda labels: np.array(labels, np.int64))
fractions = st.floats(0, 0.99)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(st.integers(0, 2**32), labels_of, fractions)
def test_a_split_takes_its_share_of_every_class_and_never_all_of_one(
    seed: int, labels: np.ndarray, fraction: float
) -> None:
    ids = np.arange(5, 5 + 3 * len(labels), 3)
    held_out = split_held_out(seed, ids, labels, fraction)
    assert np.all(np.diff(held_out) > 0)
    inside = np.isin(ids, held_out)
    assert inside.sum() == len(held_out)
    for label in np.unique(labels):
        of_class = labels == label
        expected = min(np.floor(of_class.sum() * fraction + 0.5), of_class.sum() - 1)
        assert inside[of_class].sum() == expected


@unhurried
@given(st.integers(0, 2**32), labels_of, fractions, fractions)
def test_a_larger_fraction_only_adds_samples_and_their_order_does_not_matter(
    seed: int, labels: np.ndarray, one: float, other: float
) -> None:
    ids = np.arange(len(labels))
    few, many = (set(split_held_out(seed, ids, labels, each)) for each in sorted((one, other)))
    assert few <= many
    backwards = split_held_out(seed, ids[::-1], labels[::-1], one)
    assert backwards.tolist() == split_held_out(seed, ids, labels, one).tolist()


def test_another_seed_is_another_split() -> None:
    ids, labels = np.arange(400), np.arange(400) % 4
    splits = {tuple(split_held_out(seed, ids, labels, 0.25)) for seed in range(5)}
    assert len(splits) == 5


KEYS = ("data.eval_fraction=0.2", "data.eval={}", "methods=[standard]", "execution.trace=true", "execution.threads=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of recipes/tiny.yaml without a test set, which holds out a fifth of its 300 samples."""
    folder = tmp_path_factory.mktemp("held_out")
    processes.pack_digits(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "run", *KEYS]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def held_out(run: Path) -> np.ndarray:
    return SelectionIndex.read(run / "selection.parquet").ids(State.HELD_OUT)


def test_a_fraction_that_holds_out_no_sample_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    keys = ("data.eval_fraction=0.001", "evaluation.every=1", "evaluation.choose_on=held_out")
    assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "none", *KEYS[1:], *keys]) == 3
    assert "data.eval_fraction = 0.001 holds out no sample" in capsys.readouterr().err


def test_no_network_trains_on_held_out_samples(run: Path, held_out: np.ndarray) -> None:
    assert len(held_out) == 60
    lines = [json.loads(line) for line in (run / "logs/trace-rank0.jsonl").read_text().splitlines()]
    trained = {sample for line in lines for sample in line["ids"]}
    assert len(trained) == 240
    assert not trained & set(held_out.tolist())
    assert len(pq.read_table(run / "labels.parquet")) == 300


def test_every_round_predicts_them_once_and_decides_nothing(run: Path, held_out: np.ndarray) -> None:
    for number in (0, 1):
        predictions = Predictions.read(run / f"rounds/{number}/predictions.parquet")
        mine = predictions.rows(np.isin(predictions.sample_id, held_out))
        assert mine.sample_id.tolist() == held_out.tolist()
        assert abs(int((mine.fold == 0).sum()) - 30) == 0
        note = json.loads((run / "incv.json").read_text())["rounds"][number]
        rest = predictions.rows(~np.isin(predictions.sample_id, held_out))
        assert note["agreement"] == rest.agreement()
        assert note["predicted"] == len(rest.sample_id)
    index = SelectionIndex.read(run / "selection.parquet")
    assert (index.round[held_out] == 1).all()
    assert (index.state != State.OUTSIDE).sum() == 300


def test_they_are_listed_and_evaluated_against_their_given_labels(run: Path, held_out: np.ndarray) -> None:
    table = pq.read_table(run / "labels_review.parquet").to_pylist()
    listed = [row for row in table if row["state"] == "held_out"]
    assert sorted(row["sample_id"] for row in listed) == held_out.tolist()
    assert all(row["is_label_issue"] == (row["predicted_label"] != row["given_label"]) for row in listed)
    report = json.loads((run / "report.json").read_text())
    assert report["samples"] == 240
    assert report["accuracy"]["held_out"]["standard"]["count"] == 60


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["data.eval_fraction=0.2", "data.eval={held_out: {source: digits, shards: x}}"], "data.eval.held_out"),
        (["data.eval_fraction=1.0"], "data.eval_fraction"),
    ],
)
def test_what_cannot_be_is_refused(keys: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["validate", "-c", str(RECIPES / "tiny.yaml"), *keys]) == 2
    assert words in capsys.readouterr().err


def test_too_few_samples_are_explained(run: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(run.parent)
    keys = ("data.eval_fraction=0.9", "data.train.limit=100")
    assert exit_code(["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", "few", *keys]) == 3
    assert "10 training samples (90 are held out by data.eval_fraction)" in capsys.readouterr().err
