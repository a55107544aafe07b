"""Algorithm 3 in a run: its samples and n(e), against the paper's formulas computed by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support import RECIPES
from tests.support.processes import pack_digits, run_here
from trainer.incv.selection_index import State

CLASSES, SAMPLES, BATCH, EPOCHS, RAMP, FORGET_RATE = 10, 300, 32, 5, 3, 0.3
KEYS = (
    "labels.ratio=0.5",
    "methods=[coteaching, coteaching_incv]",
    "incv.rounds=1",
    "incv.noise_estimate=paper",
    f"coteaching.epochs={EPOCHS}",
    "coteaching_incv.warmup_epochs=from_noise",
    "coteaching_incv.noise_of_selected=formula",
    f"coteaching.forget_rate={FORGET_RATE}",
    f"coteaching.ramp_epochs={RAMP}",
    "execution.threads=1",
    "execution.trace=true",
)
Line = dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of recipes/tiny.yaml, every step traced."""
    folder = pack_digits(tmp_path_factory.mktemp("algorithm3"))
    shards = [
        f"data.{part}.shards={folder}/data/shards/digits-{split}"
        for part, split in (("train", "train"), ("eval.test", "test"))
    ]
    arguments = ["run", "-c", str(RECIPES / "tiny.yaml"), "--run-dir", str(folder / "run"), *KEYS, *shards]
    code, error = run_here(arguments)
    assert code == 0, error
    return folder / "run"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def ids_in(run: Path, state: State) -> set[int]:
    table = pq.read_table(run / "selection.parquet").to_pydict()
    return {id_ for id_, found in zip(table["sample_id"], table["state"], strict=True) if found == state}


def noise_ratio(run: Path) -> float:
    """ε of Algorithm 2, line 8."""
    return float(read(run / "incv.json")["noise"]["paper"])


def noise_of_selected(run: Path) -> float:
    """ε_S = ε² / (ε² + (c - 1) (1 - ε)²), Corollary 2.2 for symmetric noise."""
    noise = noise_ratio(run)
    return noise**2 / (noise**2 + (CLASSES - 1) * (1 - noise) ** 2)


def warmup(run: Path) -> int:
    """E0: 40 % of the epochs above ε = 0.6, else 20 %."""
    return round(EPOCHS * (0.4 if noise_ratio(run) > 0.6 else 0.2))


def epochs_of(run: Path, training: str) -> list[list[Line]]:
    """The steps of a training, by epoch."""
    lines = map(json.loads, (run / "logs" / "trace-rank0.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["training"] == training]
    assert [line["step"] for line in steps] == list(range(len(steps)))
    per_epoch, rest = divmod(len(steps), EPOCHS)
    assert rest == 0
    return [steps[first : first + per_epoch] for first in range(0, len(steps), per_epoch)]


def rows_kept(rows: int, epoch: int, rate: float) -> int:
    """n(e) = round(|B_S| (1 - rate min(e / ramp, 1))), section 5.3."""
    return math.floor(rows * (1 - rate * min(epoch / RAMP, 1)) + 0.5)


def test_training_json_has_the_papers_numbers(run: Path) -> None:
    selected, candidates = len(ids_in(run, State.SELECTED)), len(ids_in(run, State.CANDIDATE))
    assert read(run / "methods" / "coteaching_incv" / "training.json") == {
        "forget_rate": pytest.approx(noise_of_selected(run)),
        "warmup_epochs": warmup(run),
        "selected": selected,
        "candidates": candidates,
        "epochs": EPOCHS,
        "steps": EPOCHS * math.ceil(selected / BATCH),
    }
    assert read(run / "methods" / "coteaching" / "training.json") == {
        "forget_rate": FORGET_RATE,
        "warmup_epochs": 0,
        "selected": SAMPLES,
        "candidates": 0,
        "epochs": EPOCHS,
        "steps": EPOCHS * math.ceil(SAMPLES / BATCH),
    }


def test_the_run_can_tell_right_from_wrong(run: Path) -> None:
    """Each state occurs, and ε_S is large enough to change the number of rows kept."""
    selected, candidates, removed = (ids_in(run, state) for state in (State.SELECTED, State.CANDIDATE, State.REMOVED))
    assert selected
    assert candidates
    assert removed
    assert len(selected | candidates | removed) == SAMPLES
    rate = read(run / "methods" / "coteaching_incv" / "training.json")["forget_rate"]
    assert rows_kept(BATCH, RAMP, rate) < BATCH
    assert rows_kept(BATCH, RAMP, 3 * rate) < rows_kept(BATCH, RAMP, rate)


def test_each_epoch_deals_s_once_and_c_after_the_warm_up(run: Path) -> None:
    selected, candidates = ids_in(run, State.SELECTED), ids_in(run, State.CANDIDATE)
    for epoch, steps in enumerate(epochs_of(run, "coteaching_incv")):
        dealt = [id_ for line in steps for id_ in line["ids"]]
        assert len(set(dealt)) == len(dealt)
        assert {id_ for id_ in dealt if id_ not in candidates} == selected
        for line in steps:
            of_s = sum(id_ in selected for id_ in line["ids"])
            of_c = len(line["ids"]) - of_s
            expected = min(of_s // 2, of_s * len(candidates) // len(selected))  # floor(b min(0.5, |C| / |S|))
            assert of_c == (expected if epoch >= warmup(run) else 0), f"epoch {epoch}"


def test_co_teaching_alone_deals_every_sample_once_an_epoch(run: Path) -> None:
    everything = set.union(*(ids_in(run, state) for state in (State.SELECTED, State.CANDIDATE, State.REMOVED)))
    for steps in epochs_of(run, "coteaching"):
        assert sorted(id_ for line in steps for id_ in line["ids"]) == sorted(everything)


@pytest.mark.parametrize("training", ["coteaching", "coteaching_incv"])
def test_each_network_keeps_the_rows_of_n_e(run: Path, training: str) -> None:
    selected = ids_in(run, State.SELECTED)
    rate = noise_of_selected(run) if training == "coteaching_incv" else FORGET_RATE
    for epoch, steps in enumerate(epochs_of(run, training)):
        for line in steps:
            of_s = [id_ for id_ in line["ids"] if training == "coteaching" or id_ in selected]
            for chosen in line["chosen"]:
                assert len(set(chosen)) == len(chosen) == rows_kept(len(of_s), epoch, rate), f"epoch {epoch}"
                assert set(chosen) <= set(line["ids"])
