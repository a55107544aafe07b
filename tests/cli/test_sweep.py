"""`--vary`: runs side by side in one process equal single runs, stop together and fail separately."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shards.durable import read_json
from tests.support import REPOSITORY
from tests.support.command_line import THREADS, TINY, stop_during_incv, variant_roots
from trainer.incv.selection_index import SelectionIndex
from trainer.records.run_directory import RunDirectory
from trainer.training.checkpoint import find_newest_checkpoint

METHODS = ("standard", "coteaching", "coteaching_incv")


def weights(root: Path) -> dict[str, torch.Tensor]:
    folders = [root / "methods" / method for method in METHODS] + sorted((root / "rounds").glob("*/fold*"))
    return {
        f"{f.name}/{n}": t for f in folders for n, t in find_newest_checkpoint(f / "checkpoints")[1].tensors.items()
    }


def assert_same_run(ours: Path, theirs: Path) -> None:
    selections = [SelectionIndex.read(RunDirectory(root).selection).checksum() for root in (ours, theirs)]
    assert selections[0] == selections[1]
    a, b = weights(ours), weights(theirs)
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.slow
def test_seeds_side_by_side_are_the_runs_of_each_alone(incv, playground):
    answer = incv("run", "-c", TINY, THREADS, "--vary", "seed=1,2", "execution.folds=side_by_side")
    assert answer.code == 0
    assert len(set(variant_roots(answer.out, "seed"))) == 2
    for seed, root in zip((1, 2), variant_roots(answer.out, "seed"), strict=True):
        assert incv("run", "-c", TINY, THREADS, f"seed={seed}", "--run-dir", f"alone-{seed}").code == 0
        assert_same_run(root, playground / f"alone-{seed}")
        assert (root / "report.html").exists()
    again = incv("run", "-c", TINY, THREADS, "--vary", "seed=1,2")
    assert again.code == 0
    assert "incv: already done" in again.err


def test_combinations_are_planned_each_for_itself(incv, playground):
    out = incv("run", "-c", TINY, "--dry-run", "--vary", "seed=1,2", "--vary", "labels.ratio=0.2,0.4").out
    headings = [line for line in out.splitlines() if line.startswith("seed=")]
    assert headings == [f"seed={seed} labels.ratio={ratio}:" for seed in (1, 2) for ratio in ("0.2", "0.4")]
    assert out.count("recipe tiny") == 4


def test_values_in_brackets_keep_their_commas(incv, playground):
    schedules = ("[[1, 0.5], [2, 0.1]]", "[[1, 0.2]]")
    averages = ("{decay: 0.9, use_buffers: true}", "null")
    out = incv(
        *("run", "-c", TINY, "--dry-run"),
        *("--vary", f"incv.optimizer.milestones={schedules[0]},{schedules[1]}"),
        *("--vary", f"standard.ema={averages[0]}, {averages[1]}"),
    ).out
    headings = [line for line in out.splitlines() if line.startswith("incv.optimizer")]
    assert headings == [
        f"incv.optimizer.milestones={schedule} standard.ema={ema}:" for schedule in schedules for ema in averages
    ]


@pytest.mark.parametrize("what", ["run-dir", "stages", "splits"])
def test_facts_are_printed_of_each_and_nothing_runs(incv, playground, what):
    answer = incv("run", "-c", TINY, "--vary", "seed=0,1", f"--print-{what}")
    assert answer.code == 0
    alone = [incv("run", "-c", TINY, f"seed={seed}", f"--print-{what}").out for seed in (0, 1)]
    assert answer.out == "".join(alone)
    assert not (playground / "runs").exists()


def test_what_a_run_prints_says_whose_it_is(incv, playground):
    answer = incv("labels", "-c", TINY, THREADS, "--vary", "seed=1,2")
    said = [line for line in answer.err.splitlines() if "labels: done" in line]
    assert [line.split()[0] for line in said] == ["seed=1:", "seed=2:"]
    for root in variant_roots(answer.out, "seed"):  # in its own log there is no doubt
        assert "INFO    labels: done" in (root / "logs" / "rank-0000.log").read_text()


def test_a_sweep_ends_with_a_table_over_its_runs(incv, playground):
    quick = ("incv=null", "methods=[standard]", "standard.epochs=1", "data.train.limit=60", "data.eval.test.limit=20")
    answer = incv("run", "-c", TINY, THREADS, *quick, "--vary", "seed=1,2")
    assert answer.code == 0, answer.err
    table = answer.out.rpartition("\n\n  in percent")[2]
    assert "mean ± sd of 2" in table
    (file,) = (playground / "runs").glob("tiny-vary-*.json")
    assert f"table: {file.relative_to(playground)}" in table
    reports = [read_json(root / "report.json") for root in variant_roots(answer.out, "seed")]
    measured = [report["accuracy"]["test"]["standard"]["top1"] for report in reports]
    assert [run["results"]["test, standard"] for run in read_json(file)["runs"]] == measured
    assert file.with_suffix(".csv").exists()
    again = incv("labels", "-c", TINY, THREADS, *quick, "--vary", "seed=1,2")
    assert "in percent" not in again.out


def test_at_once_is_for_variants(incv, playground):
    answer = incv("run", "-c", TINY, "--at-once", "2")
    assert answer.code == 2
    assert "add --vary" in answer.err


def test_a_variant_that_cannot_run_does_not_keep_the_others_from_it(incv, playground):
    assert incv("labels", "-c", TINY, THREADS, "--vary", "seed=1,2").code == 0
    trained = incv("standard", "-c", TINY, THREADS, "--vary", "seed=1,3,2")  # seed 3 has no labels yet
    assert trained.code != 0
    assert "seed=3" in trained.err
    for root, trains in zip(variant_roots(trained.out, "seed"), (True, False, True), strict=True):
        assert (find_newest_checkpoint(root / "methods" / "standard" / "checkpoints") is not None) == trains


@pytest.mark.parametrize("said", ["seed", "seed=", "seed=1,1", "=1,2"])
def test_what_cannot_be_varied_is_refused(incv, playground, said):
    answer = incv("run", "-c", TINY, "--vary", said)
    assert answer.code == 2
    assert "seed=0,1,2" in answer.err


def test_how_to_run_cannot_be_varied(incv, playground):
    answer = incv("run", "-c", TINY, "--vary", "execution.threads=1,2")
    assert answer.code == 2
    assert "vary result keys" in answer.err


def test_redo_redoes_each_variant_in_its_own_directory(incv, playground):
    first = incv("labels", "-c", TINY, THREADS, "--vary", "seed=1,2")
    again = incv("labels", "-c", TINY, THREADS, "--vary", "seed=1,2", "--redo", "labels")
    assert again.code == 0
    assert variant_roots(again.out, "seed") == variant_roots(first.out, "seed")
    assert all(root.exists() for root in variant_roots(again.out, "seed"))
    assert not (playground / "runs" / "tiny").exists()


def test_a_signal_keeps_variants_that_wait_from_beginning(playground):
    error = stop_during_incv("run", "-c", TINY, THREADS, "--vary", "seed=1,2", "--at-once", "1")
    assert "seed=2: incv: not started" in error
    assert len(list(playground.glob("runs/*/manifest.json"))) == 1


def test_one_directory_for_several_variants_is_refused(incv, playground):
    answer = incv("run", "-c", TINY, "--vary", "seed=1,2", "--run-dir", "here")
    assert answer.code == 2
    assert "--run-dir" in answer.err


@pytest.mark.slow
def test_a_signal_stops_all_and_the_same_command_goes_on(playground):
    command = [sys.executable, "-m", "trainer", "run", "-c", TINY, THREADS, "--vary", "seed=1,2"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with (playground / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL, env=environ)
        limit = time.monotonic() + 120
        while len(list(playground.glob("runs/*/rounds/0/fold*/metrics.jsonl"))) < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    stopped = sorted(playground.glob("runs/*/stopped.json"))
    assert len(stopped) == 2
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for seed, root in zip((1, 2), variant_roots(done.stdout, "seed"), strict=True):
        alone = [*command[:-2], f"seed={seed}", "--run-dir", f"alone-{seed}"]
        subprocess.run(alone, env=environ, capture_output=True, timeout=200, check=True)
        assert_same_run(playground / root, playground / f"alone-{seed}")
