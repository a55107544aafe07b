"""Runs stopped by signal or file: progress is saved, and the same command resumes to the same bits."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import trainer.passes.sample_pass
from shards.durable import read_json
from tests.support import processes
from trainer.records.run_directory import RunDirectory
from trainer.run.stage_graph import all_stages

# What asks, and the training that is running when it does.
REQUESTS = {
    "SIGTERM": "rounds/0/fold0",
    "SIGINT": "rounds/1/fold1",
    "SIGUSR2": "methods/standard",
    "STOP file": "methods/coteaching",
}
STAGES = all_stages()


@dataclass(frozen=True)
class StoppedRun:
    run_dir: Path
    left: dict[str, Path]
    """The run directory as each stop left it."""
    output: dict[str, str]
    refused: tuple[int, str, dict[str, Any]]
    """Exit code and stderr of a second process while the first ran, and the manifest after it."""


@pytest.fixture(scope="module")
def stopped(playground: Path) -> StoppedRun:
    """One run, stopped once by each kind of request, started five times with the same command."""
    run_dir = playground / "stopped"
    left, output = {}, {}
    for request, training in REQUESTS.items():
        log = playground / f"stopped_{request.replace(' ', '_')}.log"
        process = processes.start(playground, run_dir, log)
        metrics = run_dir / training / "metrics.jsonl"
        processes.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, process)  # noqa: B023
        if request == "SIGTERM":  # the first holds still meanwhile, so that it is stopped where it should be
            process.send_signal(signal.SIGSTOP)
            refused = (*_second_process(playground, run_dir), read_json(run_dir / "manifest.json"))
            process.send_signal(signal.SIGCONT)
        _ask(process, run_dir, request)
        code = processes.finish(process)
        output[request] = log.read_text()
        assert code == 75, output[request]
        left[request] = playground / "stops" / request
        shutil.copytree(run_dir, left[request])
    log = playground / "stopped_finished.log"
    assert processes.finish(processes.start(playground, run_dir, log)) == 0, log.read_text()
    return StoppedRun(run_dir, left, output, refused)


def _ask(process: "subprocess.Popen[bytes]", run_dir: Path, request: str) -> None:
    if request == "STOP file":
        (run_dir / "STOP").touch()
    else:
        process.send_signal(signal.Signals[request])


def _second_process(playground: Path, run_dir: Path) -> tuple[int, str]:
    with processes.own_process_state():
        os.chdir(playground)
        return processes.run_here(processes.command(run_dir))


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_stop_leaves_a_marker(request_: str, stopped: StoppedRun) -> None:
    marker = read_json(stopped.left[request_] / "stopped.json")
    assert marker["stage"] in STAGES
    assert isinstance(marker["step"], int)
    assert marker["reason"] == request_
    assert datetime.fromisoformat(marker["time"]).tzinfo is not None
    start = read_json(stopped.left[request_] / "manifest.json")["starts"][-1]
    assert start["ended"] == "stopped"
    assert sum(start["steps_executed"].values()) > 0
    assert "Traceback" not in stopped.output[request_]
    assert "run the same command again" in stopped.output[request_]
    if job := re.fullmatch(r"incv/(\d)/(\d)", marker.get("where", "")):  # called as in progress lines, from 1
        round_, fold = (int(part) + 1 for part in job.groups())
        place = f"incv, round {round_}/2, fold {fold}/2 at step {marker['step']}"
        assert f"stopped in {place}" in stopped.output[request_]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_stop_leaves_a_durable_checkpoint_and_nothing_torn(request_: str, stopped: StoppedRun) -> None:
    run_dir = stopped.left[request_]
    processes.require_whole(run_dir)
    marker = read_json(run_dir / "stopped.json")
    running = processes.trainings(run_dir).get(marker.get("where", marker["stage"]))
    if running is not None:  # a training, and not a pass that predicts
        assert processes.newest_durable_step(running) == marker["step"] > 0
        lines = [json.loads(line) for line in (running / "metrics.jsonl").read_text().splitlines()]
        assert all(line["step"] <= marker["step"] for line in lines)


def test_a_run_that_went_on_is_the_undisturbed_run(stopped: StoppedRun, uninterrupted: Path) -> None:
    processes.require_same_results(stopped.run_dir, uninterrupted)
    processes.require_whole(stopped.run_dir)
    assert not (stopped.run_dir / "stopped.json").exists()
    starts = read_json(stopped.run_dir / "manifest.json")["starts"]
    assert [start["ended"] for start in starts] == ["stopped"] * 4 + ["finished"]


def test_a_stop_costs_few_steps(stopped: StoppedRun, uninterrupted: Path) -> None:
    """Nothing is executed twice but what a stop inside a predict pass, at the end of an epoch, had not saved."""
    (once,) = (start["steps_executed"] for start in read_json(uninterrupted / "manifest.json")["starts"])
    starts = read_json(stopped.run_dir / "manifest.json")["starts"]
    executed = sum(sum(start["steps_executed"].values()) for start in starts)
    assert 0 <= executed - sum(once.values()) <= len(REQUESTS) * 2 * processes.CHECKPOINT_EVERY


def test_the_stop_file_is_put_away_once_obeyed(stopped: StoppedRun) -> None:
    left = stopped.left["STOP file"]
    assert not (left / "STOP").exists()
    assert [path.name for path in left.glob("STOP*")] == ["STOP.obeyed"]


def test_a_second_process_in_the_same_directory_is_refused(stopped: StoppedRun) -> None:
    code, error, manifest = stopped.refused
    assert code == 2, error
    assert "another process is using" in error
    assert "--run-dir" in error
    assert len(manifest["starts"]) == 1


def test_a_refused_process_leaves_the_stop_file_to_the_one_that_runs(
    uninterrupted: Path, playground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    holder = RunDirectory(run_dir)
    holder.acquire()
    (run_dir / "STOP").touch()
    monkeypatch.chdir(playground)
    code, error = processes.run_here(processes.command(run_dir))
    holder.release()
    assert code == 2, error
    assert (run_dir / "STOP").exists()


def test_a_stop_file_from_before_the_start_is_no_longer_meant(
    uninterrupted: Path, playground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted, run_dir)
    (run_dir / "STOP").touch()
    os.utime(run_dir / "STOP", (1e9, 1e9))
    monkeypatch.chdir(playground)
    code, error = processes.run_here(processes.command(run_dir))
    assert code == 0, error
    assert not (run_dir / "STOP").exists()
    assert "STOP" in error, "contract 10: removed with a warning"


@pytest.mark.slow
@pytest.mark.parametrize("number_of_pass", [1, 6], ids=["at_the_end_of_an_epoch", "after_the_training"])
def test_a_predict_pass_can_be_stopped(
    number_of_pass: int, uninterrupted: Path, playground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 1 judges after each of its five epochs, and once more with the best network."""
    run_dir = tmp_path / "run"
    iterate_forward, calls = trainer.passes.sample_pass.iterate_forward, itertools.count(1)

    def asked(*arguments: Any) -> Iterator[Any]:
        if next(calls) == number_of_pass:
            (run_dir / "STOP").touch()
        return iterate_forward(*arguments)

    monkeypatch.setattr(trainer.passes.sample_pass, "iterate_forward", asked)
    monkeypatch.chdir(playground)
    code, error = processes.run_here(processes.command(run_dir))
    assert code == 75, error
    marker = read_json(run_dir / "stopped.json")
    assert marker["stage"] == "incv"
    assert isinstance(marker["step"], int)
    assert marker["reason"] == "STOP file"
    processes.require_whole(run_dir)
    assert not (run_dir / "rounds/0/fold0/predictions.parquet").exists()
    durable = processes.newest_durable_step(run_dir / "rounds/0/fold0")
    assert durable == (25 if number_of_pass == 6 else 5)  # an epoch has 5 steps
    assert processes.run_here(processes.command(run_dir))[0] == 0
    processes.require_same_results(run_dir, uninterrupted)
