"""A fabricated run: 600 samples of 10 classes, three rounds, two methods, as a finished run leaves them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from shards.durable import read_json, write_json, write_parquet
from trainer.incv.selection_index import SelectionIndex, State
from trainer.report.findings import CHECKS

SAMPLES, CLASSES, RATIO = 600, 10, 0.4
OUTSIDE = np.array([5, 77, 400])  # rejected in packing
UNREADABLE = 33


def fabricate(
    run_dir: Path, *, names: list[str] | None = None, samples: int = SAMPLES, classes: int = CLASSES
) -> Path:
    """Write the files of a finished run whose predictions are right more often than its labels."""
    rng = np.random.default_rng(7)
    true = rng.integers(0, classes, samples).astype(np.int32)
    given = np.where(rng.random(samples) < RATIO, (true + rng.integers(1, classes, samples)) % classes, true)
    ids = np.arange(samples, dtype=np.int64)
    write_parquet(run_dir / "labels.parquet", pa.table({"sample_id": ids, "label": given.astype(np.int32)}))
    write_parquet(run_dir / "true_labels.parquet", pa.table({"sample_id": ids, "label": true}))
    _write_rounds(run_dir, rng, true, given.astype(np.int32), classes)
    _write_texts(run_dir, names or [str(number) for number in range(classes)], samples, classes)
    _write_metrics(run_dir, rng)
    return run_dir


def _write_rounds(run_dir: Path, rng: np.random.Generator, true: np.ndarray, given: np.ndarray, classes: int) -> None:
    samples = len(true)
    inside = np.setdiff1d(np.arange(samples), OUTSIDE)
    selection = _in_state(SelectionIndex.of_candidates(samples, inside), np.array([UNREADABLE]), State.UNREADABLE)
    for index, skill in enumerate((0.72, 0.8, 0.84)):
        held_out = np.flatnonzero(np.isin(selection.state, (State.CANDIDATE, State.UNREADABLE)))
        right = rng.random(samples) < skill
        predicted = np.where(right, true, rng.integers(0, classes, samples)).astype(np.int32)
        loss = np.where(predicted == given, rng.exponential(0.3, samples), 1 + rng.exponential(1.6, samples))
        columns = {
            "sample_id": held_out.astype(np.int64),
            "fold": (held_out % 2).astype(np.int8),
            "predicted": predicted[held_out],
            "loss": loss[held_out].astype(np.float32),
            "given_probability": np.exp(-loss[held_out]).astype(np.float32),
            "predicted_probability": rng.uniform(0.6, 1.0, len(held_out)).astype(np.float32),
            "status": (held_out == UNREADABLE).astype(np.int8),
        }
        for name in ("loss", "given_probability", "predicted_probability"):
            columns[name][held_out == UNREADABLE] = np.nan
        folder = run_dir / "rounds" / str(index)
        write_parquet(folder / "predictions.parquet", pa.table(columns))
        usable = held_out[held_out != UNREADABLE]
        agreeing = usable[predicted[usable] == given[usable]]
        others = usable[predicted[usable] != given[usable]]
        worst = others[np.argsort(-loss[others])][: len(agreeing) // 10]
        selection = _in_state(_in_state(selection, agreeing, State.SELECTED), worst, State.REMOVED)
        selection = _judged(selection, usable, index, columns)
        selection.write(folder / "selection.parquet")
    selection.write(run_dir / "selection.parquet")


def _write_texts(run_dir: Path, names: list[str], samples: int, classes: int) -> None:
    transition = np.full((classes, classes), 0.42 / (classes - 1))
    np.fill_diagonal(transition, 0.58)
    kept = transition.tolist() if classes <= 100 else None  # as INCV itself does
    noise = {"paper": 0.263, "confident": 0.421, "transition": kept, "prior": [1 / classes] * classes}
    rounds = [{"agreement": value, "remove_ratio": 0.1, "network": "best"} for value in (0.49, 0.31, 0.24)]
    filled = [{"class": 3, "selected": 4, "filled": 6}]
    write_json(
        run_dir / "incv.json",
        {"noise": noise, "rounds": rounds, "ended_early": None, "filled_classes": filled},
    )
    pair = {
        "networks": [{"top1": 391, "top5": 399}, {"top1": 394, "top5": 400}],
        "ensemble": {"top1": 395, "top5": 400},
    }
    single = {"count": 400, "networks": [{"top1": 372, "top5": 398}], "ensemble": None}
    write_json(run_dir / "evaluation.json", {"test": {"standard": single, "coteaching_incv": {"count": 400, **pair}}})
    config = {
        "seed": 1,
        "methods": ["standard", "coteaching_incv"],
        "model": {"name": "small_cnn"},
        "labels": {"noise": "symmetric", "ratio": RATIO},
        "incv": {"rounds": 3},
    }
    (run_dir / "config.resolved.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    start = {
        "time": "2025-03-04T10:00:00+00:00",
        "command": "incv run recipes/demo.yaml",
        "resumed_from": None,
        "versions": {"python": "3.11.9", "torch": "2.14.1", "numpy": "2.1.0"},
        "threads": 2,
    }
    again = {
        **start,
        "time": "2025-03-04T10:02:11+00:00",
        "resumed_from": {"stage": "incv", "round": 1, "fold": 0, "step": 60},
        "world": 16,
        "launcher": "torchrun",
        "device": "cuda:0",
    }
    seconds = {"labels": 0.12, "incv": 41.3, "standard": 12.5, "coteaching_incv": 66.4, "evaluate": 1.9}
    manifest = {
        "recipe": "demo",
        "stages": {stage: {"seconds": value} for stage, value in seconds.items()} | {"report": {"seconds": 0.0}},
        "starts": [start, again],
        "dataset": {"class_names": names, "samples": samples, "source": "digits"},
    }
    write_json(run_dir / "manifest.json", manifest)


def _write_metrics(run_dir: Path, rng: np.random.Generator) -> None:
    folders = [run_dir / "rounds" / str(index) / f"fold{fold}" for index in range(3) for fold in range(2)]
    folders += [run_dir / "methods" / method for method in ("standard", "coteaching_incv")]
    for folder in folders:
        folder.mkdir(parents=True)
        steps = np.arange(1, 451)
        losses = 0.4 + 1.9 * np.exp(-steps / 120) + rng.normal(0, 0.04, len(steps))
        lines = [
            {
                "step": int(step),
                "epoch": round(step / 15, 2),
                "loss": loss,
                "train_accuracy": min(1, 0.1 + 0.6 * step / 450),
            }
            for step, loss in zip(steps.tolist(), losses.tolist(), strict=True)
        ]
        lines[10]["kept"] = 110
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def examine(run_dir: Path, groups: Sequence[Sequence[int]] = (), **kinds: Sequence[int]) -> None:
    """Write what a judge by features leaves: groups of duplicates, and the images of each kind, by sample_id."""
    ids = np.setdiff1d(np.arange(len(pq.read_table(run_dir / "labels.parquet"))), OUTSIDE)
    own = np.arange(len(ids))
    for group in groups:
        own[np.isin(ids, group)] = np.flatnonzero(ids == min(group))[0]
    columns = {name: np.isin(ids, kinds.get(name, ())) for name in ("off_topic", *CHECKS)}
    write_parquet(run_dir / "examination.parquet", pa.table({"sample_id": ids, "group": own} | columns))
    why = {"why": "the usual"}
    facts = {"near_duplicates": why, "off_topic": why, "checks": dict.fromkeys(CHECKS, why)}
    write_json(run_dir / "examination.json", facts)
    write_json(run_dir / "incv.json", read_json(run_dir / "incv.json") | {"judge": {"converged": True}})


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(**options: Any) -> Path:
        return fabricate(tmp_path / "run", **options)

    return make


def _in_state(index, ids, state):
    states = index.state.copy()
    states[ids] = state
    return replace(index, state=states)


def _judged(index, usable, round_, columns):
    """The index with the last prediction of each usable sample. columns: of the round's held-out samples."""
    rounds = index.round.copy()
    rounds[columns["sample_id"]] = round_
    among = np.isin(columns["sample_id"], usable)
    names = ("predicted", "loss", "given_probability", "predicted_probability")
    measured = {name: getattr(index, name).copy() for name in names}
    for name, column in measured.items():
        column[usable] = columns[name][among]
    return replace(index, round=rounds, **measured)
