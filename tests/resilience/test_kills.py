"""Runs killed with SIGKILL at critical points: the same command resumes and ends with the same bits."""

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shards.durable import read_json
from tests.support import processes
from trainer.training.checkpoint import read_checkpoint
from trainer.training.loop import checkpoint_interval

POINTS = ("fold_training", "predict_pass", "checkpoint_write", "coteaching", "evaluation")
RUNNING = {  # the training that runs, or is needed next, at each point
    "fold_training": "rounds/0/fold1",
    "predict_pass": "rounds/0/fold1",
    "checkpoint_write": "methods/coteaching_incv",
    "coteaching": "methods/coteaching_incv",
    "evaluation": "methods/coteaching_incv",
}


@dataclass(frozen=True)
class KilledRun:
    run_dir: Path
    corpses: dict[str, Path]
    """The run directory as each kill left it."""
    exit_codes: list[int]


@pytest.fixture(scope="module")
def killed(playground: Path) -> KilledRun:
    """One run, killed five times, started six times with the same command."""
    run_dir = playground / "killed"
    corpses, exit_codes = {}, []
    for point in POINTS:
        log = playground / f"killed_{point}.log"
        exit_codes.append(processes.finish(processes.start(playground, run_dir, log, killed_at=point)))
        assert exit_codes[-1] == -signal.SIGKILL, log.read_text()
        corpses[point] = playground / "corpses" / point
        shutil.copytree(run_dir, corpses[point])
    log = playground / "killed_finished.log"
    exit_codes.append(processes.finish(processes.start(playground, run_dir, log)))
    assert exit_codes[-1] == 0, log.read_text()
    return KilledRun(run_dir, corpses, exit_codes)


def test_every_kill_is_a_start_of_its_own(killed: KilledRun) -> None:
    assert killed.exit_codes == [-signal.SIGKILL] * 5 + [0]
    starts = read_json(killed.run_dir / "manifest.json")["starts"]
    assert [start["ended"] for start in starts] == [None] * 5 + ["finished"]


def test_each_start_resumes_from_the_newest_durable_step(killed: KilledRun) -> None:
    starts = read_json(killed.run_dir / "manifest.json")["starts"]
    assert starts[0]["resumed_from"] is None
    for point, start in zip(POINTS, starts[1:], strict=True):
        assert start["resumed_from"] == _expected_resume(killed.corpses[point], point), point


def test_the_kills_were_where_they_should_be(killed: KilledRun) -> None:
    """Beyond step 0, except where the first checkpoint beyond step 0 was just being written."""
    resumed = {point: _expected_resume(corpse, point) for point, corpse in killed.corpses.items()}
    assert resumed["fold_training"]["step"] in (5, 10)
    assert resumed["predict_pass"]["step"] == 25  # training was complete
    assert resumed["checkpoint_write"]["step"] == 0
    assert resumed["coteaching"]["step"] in (5, 10)
    assert resumed["evaluation"]["step"] == 1  # one method's pass is kept
    assert not (killed.corpses["predict_pass"] / "rounds/0/fold1/predictions.parquet").exists()
    torn = processes.temporary_files(killed.corpses["checkpoint_write"])
    assert [folder.name.split(".tmp")[0] for folder in torn] == [".step-0000000005"]
    with pytest.raises((ValueError, OSError)):
        read_checkpoint(torn[0])


def _expected_resume(corpse: Path, point: str) -> dict[str, Any]:
    if point == "evaluation":
        done = read_json(corpse / "evaluation.partial.json")
        return {"stage": "evaluate", "round": None, "fold": None, "step": sum(map(len, done.values()))}
    step = processes.newest_durable_step(corpse / RUNNING[point])
    if point in ("fold_training", "predict_pass"):
        return {"stage": "incv", "round": 0, "fold": 1, "step": step}
    return {"stage": "coteaching_incv", "round": None, "fold": None, "step": step}


def test_few_steps_are_executed_twice(killed: KilledRun, uninterrupted: Path) -> None:
    once = _steps_by_training(uninterrupted)
    (only_start,) = read_json(uninterrupted / "manifest.json")["starts"]
    assert only_start["steps_executed"] == once  # every step of every training, once
    intervals = {name: checkpoint_interval(steps, processes.CHECKPOINT_EVERY) for name, steps in once.items()}
    for name, interval in intervals.items():
        assert 5 * interval <= once[name], f"{name} has a checkpoint in less than every fifth"
    starts = read_json(killed.run_dir / "manifest.json")["starts"]
    executed = sum(sum(start["steps_executed"].values()) for start in starts)
    kills = len(POINTS)
    assert sum(once.values()) <= executed <= sum(once.values()) + kills * 2 * max(intervals.values())


def _steps_by_training(run_dir: Path) -> dict[str, int]:
    return {name: processes.newest_durable_step(folder) for name, folder in processes.trainings(run_dir).items()}


def test_the_results_are_those_of_the_undisturbed_run(killed: KilledRun, uninterrupted: Path) -> None:
    processes.require_same_results(killed.run_dir, uninterrupted)


def test_nothing_torn_is_left(killed: KilledRun) -> None:
    processes.require_whole(killed.run_dir)


@pytest.mark.parametrize("point", POINTS)
def test_without_its_checkpoints_a_run_does_not_start_over(
    point: str, killed: KilledRun, playground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(killed.corpses[point], run_dir)
    checkpoints = run_dir / RUNNING[point] / "checkpoints"
    shutil.rmtree(checkpoints)
    metrics = (run_dir / RUNNING[point] / "metrics.jsonl").read_bytes()
    monkeypatch.chdir(playground)
    code, error = processes.run_here(processes.command(run_dir))
    assert code == 3, error
    assert str(checkpoints) in error
    assert "--redo " + ("incv" if "rounds" in RUNNING[point] else "coteaching_incv") in error
    assert not list(checkpoints.glob("step-*"))
    assert (run_dir / RUNNING[point] / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_the_advice_to_redo_a_stage_that_lost_its_checkpoints_works(
    killed: KilledRun, playground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other fold still has its checkpoints; the stage has to begin again all the same."""
    run_dir = tmp_path / "run"
    shutil.copytree(killed.corpses["fold_training"], run_dir)
    shutil.rmtree(run_dir / "rounds/0/fold1/checkpoints")
    monkeypatch.chdir(playground)
    alone = ["incv", *processes.command(run_dir)[1:], "--redo", "incv"]
    code, error = processes.run_here(alone)
    assert code == 0, error
    assert (run_dir / "selection.parquet").exists()
    assert list((run_dir / "old").rglob("fold1"))


@pytest.mark.parametrize("damaged", ["tensors.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_passed_over(
    damaged: str,
    killed: KilledRun,
    uninterrupted: Path,
    playground: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the two that are kept, the older one serves."""
    run_dir = tmp_path / "run"
    shutil.copytree(killed.corpses["coteaching"], run_dir)
    training = run_dir / "methods/coteaching_incv"
    *_, older, newest = processes.step_folders(training)
    (newest / damaged).write_bytes((newest / damaged).read_bytes()[:-20])
    monkeypatch.chdir(playground)
    code, error = processes.run_here(["coteaching_incv", *processes.command(run_dir)[1:]])
    assert code == 0, error
    assert f"{newest} is damaged" in error
    assert read_json(run_dir / "manifest.json")["starts"][-1]["resumed_from"]["step"] == processes.step_of(older)
    ours = processes.step_folders(training)[-1] / "tensors.safetensors"
    theirs = processes.step_folders(uninterrupted / "methods/coteaching_incv")[-1] / "tensors.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
