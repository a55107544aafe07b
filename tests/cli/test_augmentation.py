"""Whole runs with every augmentation: independent of workers, resumed bit for bit, refused where they do not fit."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import THREADS, TINY, Answer, unchanged
from tests.support.processes import DRIVER, finish, require_whole, step_folders, trainings

Incv = Callable[..., Answer]
AUGMENTED = (
    *("image.pad=0", "image.random_resized_crop={scale: [0.5, 1.0]}", "image.rand_augment.operations=1"),
    "image.auto_augment=cifar10",
    *("image.color_jitter={brightness: 0.3, hue: 0.1}", "incv.mixup.alpha=0.3", "standard.mixup.alpha=0.3"),
)
SHORT = (
    *("data.train.limit=100", "batch.global=8", "incv.rounds=1", "incv.epochs=2", "incv.round_network=last"),
    *("incv.min_per_class=2", "standard.epochs=2", "methods=[standard]", "execution.checkpoint_every=5"),
)
RUN = ("run", "-c", TINY, THREADS, *SHORT, *AUGMENTED, "--run-dir")


def ends(run: Path) -> dict[str, bytes]:
    """The tensors in the last checkpoint of every training."""
    return {
        name: (step_folders(folder)[-1] / "tensors.safetensors").read_bytes()
        for name, folder in trainings(run).items()
    }


def test_workers_change_nothing_and_the_trace_names_what_was_drawn(incv: Incv, playground: Path) -> None:
    for run_dir, workers in (("one", 1), ("three", 3)):
        answer = incv(*RUN, run_dir, f"execution.workers={workers}", "execution.trace=true")
        assert answer.code == 0, answer.err
    assert ends(playground / "one") == ends(playground / "three")
    assert ends(playground / "one").keys() == {"incv/0/0", "incv/0/1", "standard"}
    lines = [json.loads(line) for line in (playground / "one/logs/trace-rank0.jsonl").read_text().splitlines()]
    for line in lines:
        assert len(line["operations"]) == len(line["shares"]) == len(line["ids"])
        assert sorted(line["partners"]) == sorted(line["ids"])
        assert {one[0] for drawn in line["operations"] for one in drawn} >= {"brightness", "hue"}


def test_each_augmentation_changes_the_training(incv: Incv, playground: Path) -> None:
    found = {}
    plain = ("run", "-c", TINY, THREADS, *SHORT, "incv=null", "image.pad=0", "--run-dir")
    for number, key in enumerate(
        ("seed=0", *(key for key in AUGMENTED if not key.startswith(("incv.", "image.pad"))))
    ):
        answer = incv(*plain, f"run{number}", key)
        assert answer.code == 0, answer.err
        found[key] = ends(playground / f"run{number}")["standard"]
    assert len(set(found.values())) == len(found) == 6


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(incv: Incv, playground: Path) -> None:
    longer = "incv.epochs=4"  # 28 steps in each fold; the run is killed in the second
    killed = subprocess.Popen([sys.executable, str(DRIVER), "fold_training", "--", *RUN, "killed", longer])
    assert finish(killed) == -9
    for run_dir in ("killed", "whole"):
        answer = incv(*RUN, run_dir, longer)
        assert answer.code == 0, answer.err
    require_whole(playground / "killed")
    assert ends(playground / "killed") == ends(playground / "whole")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["execution.loader=resident"], "image.resize and image.random_resized_crop null"),
        (["methods=[coteaching_incv]", "coteaching.mixup.alpha=0.2"], "coteaching_incv does not support mixup"),
    ],
)
def test_what_does_not_fit_is_refused(incv: Incv, playground: Path, arguments: list[str], words: str) -> None:
    with unchanged(playground):
        answer = incv(*RUN, "run", *arguments)
    assert answer.code == 2
    assert words in answer.err
