"""Images damaged after packing: the run continues, logs each once per place, and the report names them."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shards.errors import DataError
from shards.sample_index import SampleIndex
from tests.support import RECIPES, processes
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import open_image_set
from trainer.loading.sample_order import derive_stream
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.models.factory import create_model
from trainer.records.run_directory import RunDirectory
from trainer.records.stored_labels import read_labels
from trainer.records.unreadable import Location, UnreadableLog, parse_complete_lines
from trainer.run.recipe import load_recipe
from trainer.run.runner import run_recipe

TINY = RECIPES / "tiny.yaml"
BRIEF = ["execution.threads=1", "incv.rounds=1", "incv.epochs=1", "standard.epochs=1", "coteaching.epochs=1"]
CPU = torch.device("cpu")
IMAGE = ImageConfig(size=8, flip=False)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """The folder of the packed digits, which recipes/tiny.yaml finds from the current folder."""
    monkeypatch.chdir(tmp_path)
    processes.pack_digits(tmp_path)
    return tmp_path / "data" / "shards"


def broken(folder: Path, sample: int) -> str:
    """Overwrite the image of `sample` in its shard and hide it from the check at the start; returns its key."""
    index = SampleIndex.load(folder)
    path = index.shard_path(int(index.shard[sample]))
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(int(index.offset[sample]))
        file.write(b"\0" * int(index.nbytes[sample]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return index.keys(np.array([sample]))[0]


def run_of(tmp_path: Path, *overrides: str) -> Path:
    assert run_recipe(load_recipe(TINY, [*BRIEF, *overrides]), "tiny", tmp_path / "run") == 0
    return tmp_path / "run"


def chosen(tmp_path: Path, count: int) -> list[int]:
    """Training samples of the run; the stage `labels` checks the shards and notes that they are good."""
    assert run_recipe(load_recipe(TINY, BRIEF), "tiny", tmp_path / "run", only="labels") == 0
    ids = read_labels(tmp_path / "run" / "labels.parquet").ids
    return [int(sample) for sample in ids[10 : 10 + count]]


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "logs" / "unreadable-rank0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loader", ["resident", "cpu"])
def test_a_run_goes_on_and_its_report_names_the_image(loader, digits, tmp_path):
    (sample,) = chosen(tmp_path, 1)
    test_sample = int(SampleIndex.load(digits / "digits-test").usable_ids()[0])
    key = broken(digits / "digits-train", sample)
    run = run_of(tmp_path, f"execution.loader={loader}", "data.eval.test.limit=null")
    # The evaluation set broke as well, before its stage: a second start meets it.
    test_key = broken(digits / "digits-test", test_sample)
    assert run_recipe(load_recipe(TINY, [*BRIEF, "data.eval.test.limit=null"]), "tiny", run, redo=["evaluate"]) == 0
    report, page = json.loads((run / "report.json").read_text()), (run / "report.html").read_text()
    assert report["unreadable"]["count"] == 2
    of_train, of_test = report["unreadable"]["samples"]
    assert (of_train["split"], of_train["sample_id"], of_train["key"]) == ("train", sample, key)
    assert set(of_train["met"]) > {"standard: training", "coteaching: training"}
    # Trained on in one fold, held out in the other.
    folds = {place for place in of_train["met"] if place.startswith("incv")}
    assert folds in (
        {"incv, round 1, fold 1: training", "incv, round 1, fold 2: predicting"},
        {"incv, round 1, fold 2: training", "incv, round 1, fold 1: predicting"},
    )
    assert (of_test["split"], of_test["sample_id"], of_test["key"]) == ("test", test_sample, test_key)
    assert "evaluate: predicting with coteaching_incv" in of_test["met"]
    assert "Images that could not be read" in page
    assert re.search(rf"<td[^>]*>(<[^>]*>)*{key}<", page)
    written = [tuple(line.values()) for line in lines_of(run)]
    assert len(set(written)) == len(written)
    assert json.loads((run / "evaluation.json").read_text())["test"]["standard"]["unreadable"] == 1


def test_a_run_without_broken_images_says_nothing_of_them(digits, tmp_path):
    run = run_of(tmp_path, "methods=[standard]", "incv=null")
    assert json.loads((run / "report.json").read_text())["unreadable"] == {"count": 0, "samples": []}
    assert "could not be read" not in (run / "report.html").read_text()
    assert not list((run / "logs").glob("unreadable*"))


def test_too_many_broken_images_end_the_training(digits, tmp_path):
    samples = chosen(tmp_path, 4)
    for sample in samples:
        broken(digits / "digits-train", sample)
    with pytest.raises(DataError, match=r"4 of the 300 training samples.*data\.max_unreadable = 1\.0%"):
        run_of(tmp_path, "methods=[standard]", "incv=null")
    assert {line["sample_id"] for line in lines_of(tmp_path / "run")} == set(samples)
    run = run_of(tmp_path, "methods=[standard]", "incv=null", "data.max_unreadable=0.02")
    assert len(lines_of(run)) == 4  # not again


def image_set(folder: Path):
    index = SampleIndex.load(folder)
    ids = index.usable_ids()[:60]
    return open_image_set(index, ids, index.label.astype(np.int64), IMAGE, ExecutionConfig(loader="cpu"), CPU)


def read_through(data) -> None:
    for _ in data.loader.batches(data.predict_requests(data.ids, 16)):
        pass


def test_a_place_is_written_once_and_a_torn_line_is_forgotten(digits, tmp_path):
    folder, run = digits / "digits-train", RunDirectory(tmp_path / "run")
    data = image_set(folder)
    first, second = (int(sample) for sample in data.ids[[3, 40]])
    broken(folder, first)
    place = Location("train", "incv", "training", 0, 1)
    for _ in range(2):  # a second epoch, and a second start
        watched = UnreadableLog(run, 0).watch(data, place)
        read_through(watched)
        read_through(watched)
    log = run.unreadable(0)
    assert [line["sample_id"] for line in parse_complete_lines(log.read_bytes())] == [first]
    with log.open("ab") as file:
        file.write(b'{"sample_id": 4')
    broken(folder, second)
    read_through(UnreadableLog(run, 0).watch(data, place))
    assert [line["sample_id"] for line in parse_complete_lines(log.read_bytes())] == [first, second]
    assert log.read_bytes().count(b"\n") == 2
    read_through(UnreadableLog(run, 0).watch(data, Location("train", "incv", "predicting", 0, 1)))
    assert len(list(parse_complete_lines(log.read_bytes()))) == 4
    data.close()


def train_as(rank: int, folder: Path, run: Path, answers: multiprocessing.Queue) -> None:
    """One of two ranks: an epoch of standard training on its own part of every batch."""
    torch.set_num_threads(1)
    data = image_set(folder)
    plan = StaticPlan(derive_stream(0, "standard"), data.ids, 16, 1)
    task = StandardTask(
        create_model("digits_cnn", 10, 0),
        TaskSettings(OptimizerConfig(), plan.schedule, torch.from_numpy(data.labels), SINGLE_PROCESS),
    )
    watched = UnreadableLog(RunDirectory(run), rank).watch(data, Location("train", "standard", "training"))
    steps, ids = 0, []
    batches = watched.training_batches(plan.schedule, plan.plans(), 0, World(rank, 2, CPU, 1))
    for at, batch in zip(plan.steps(), batches, strict=True):
        steps += bool(task.step(batch, at))
        ids += batch.ids[batch.weights > 0].tolist()
    data.close()
    answers.put((rank, steps, ids))


def test_of_two_ranks_one_meets_the_image_and_neither_loses_a_step(digits, tmp_path):
    folder = digits / "digits-train"
    ids = image_set(folder).ids
    sample = int(ids[17])
    broken(folder, sample)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=train_as, args=(rank, folder, tmp_path / "run", answers)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = sorted(answers.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    (_, steps, first), (_, other_steps, second) = found
    assert steps == other_steps == 4
    assert sorted(first + second) == sorted(set(ids.tolist()) - {sample})
    logs = list((tmp_path / "run" / "logs").iterdir())
    assert len(logs) == 1  # the other rank has nothing to report
    assert [line["sample_id"] for line in parse_complete_lines(logs[0].read_bytes())] == [sample]


@pytest.mark.cluster
def test_two_ranks_go_on_together_and_the_report_names_the_image(digits, tmp_path):
    """A step in which one rank has a row less: its loss is weighed by the rows of both, and nobody waits for ever."""
    (sample,) = chosen(tmp_path, 1)
    key = broken(digits / "digits-train", sample)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    launcher.append(f"--master-port={processes.free_ports(1)[0]}")
    run = ["-m", "trainer", "run", "-c", str(TINY), "--run-dir", str(tmp_path / "run"), *BRIEF, "execution.world=2"]
    done = subprocess.run([*launcher, *run], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [one["key"] for one in report["unreadable"]["samples"]] == [key]
