"""What --profile measures in real trainings, where it is written, and how the report shows it."""

import json
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shards.durable import read_json, write_json
from tests.support import processes
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig
from trainer.distributed.stop import Stopped
from trainer.distributed.world import SINGLE_PROCESS
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StaticPlan
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.passes.sample_pass import SamplePass
from trainer.records import profile_trace
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import StartLog
from trainer.records.profile import FILE, Profile, merge_profiles
from trainer.records.run_directory import RunDirectory
from trainer.training import loop as train_loop
from trainer.training.checkpoint import Checkpointer
from trainer.training.interleave import interleave, run_to_end
from trainer.training.loop import RunContext, TrainingJob, iterate_training, train

PHASES = ("data_wait", "step", "checkpoint", "warm_up", "other")
FOLDS = [("incv", round_, fold) for round_ in (0, 1) for fold in (0, 1)]
METHODS = [("standard", None, None), ("coteaching", None, None), ("coteaching_incv", None, None)]
STANDARD_ALONE = ("methods=[standard]", "incv=null")
NAP = 0.05  # seconds


def slowed(function):
    def slow(*arguments, **more):
        time.sleep(NAP)
        return function(*arguments, **more)

    return slow


def name_of(entry):
    return entry["stage"], entry["round"], entry["fold"]


def require_sound(entry):
    """Every phase took time, and together they are the whole; folds that are judged by their best epoch predict."""
    assert set(entry["seconds"]) == {*PHASES, *(["predict"] if entry["stage"] == "incv" else [])}
    assert all(seconds > 0 for seconds in entry["seconds"].values())
    assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_s"], rel=0.02)
    assert entry["device"] == "CPU"


# --- whole runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    return processes.pack_digits(tmp_path_factory.mktemp("profiled"))


def incv(folder, *arguments):
    """A command inside this process, in `folder`; its exit code and stderr."""
    with processes.own_process_state():
        os.chdir(folder)
        return processes.run_here([*arguments, "-c", str(processes.RECIPE), *processes.EXECUTION])


@pytest.fixture(scope="module")
def profiled(playground):
    """A run of all stages whose folds share the process."""
    code, error = incv(
        playground, "run", "--run-dir", "run", "--profile", "execution.folds=side_by_side", "coteaching.epochs=3"
    )
    assert code == 0, error
    return playground / "run"


def test_every_training_of_a_run_has_an_entry(profiled):
    entries = read_json(profiled / FILE)
    assert [name_of(entry) for entry in entries] == [*FOLDS, *METHODS]
    for entry in entries:
        require_sound(entry)
    executed = read_json(profiled / "manifest.json")["starts"][0]["steps_executed"]
    assert [entry["steps"] for entry in entries[:4]] == [
        executed[f"incv/{round_}/{fold}"] for _, round_, fold in FOLDS
    ]
    assert [entry["steps"] for entry in entries[4:]] == [executed[method] for method, _, _ in METHODS]


def test_times_are_those_of_the_stages(profiled):
    """Folds that take turns do not count each other's time."""
    stages = read_json(profiled / "manifest.json")["stages"]
    for stage in ("incv", "standard", "coteaching", "coteaching_incv"):
        walls = [entry["wall_s"] for entry in read_json(profiled / FILE) if entry["stage"] == stage]
        assert 0.5 * stages[stage]["seconds"] < sum(walls) <= stages[stage]["seconds"] + 0.001


def test_the_report_shows_it(profiled):
    page, report = (profiled / "report.html").read_text(), read_json(profiled / "report.json")
    assert [training["training"] for training in report["profile"]] == [
        *(f"Round {round_ + 1}, fold {fold + 1}" for _, round_, fold in FOLDS),
        "Standard training",
        "Co-teaching",
        "INCV + Co-teaching",
    ]
    columns = ("data wait", "step", "predict", "checkpoint", "warm-up", "other")
    text = re.sub(r"(<[^>]*>|\s)+", " ", page)
    assert " ".join(columns) in text
    standard = report["profile"][4]
    stepped = f"{100 * standard['seconds']['step'] / standard['wall_s']:.1f} %"
    row = text[text.index("Standard training 50 ") :]
    assert stepped in row[: row.index("Co-teaching")]
    assert f"Standard training, step: {stepped}" in page  # the bar


def test_a_stage_that_is_redone_is_measured_anew(profiled, playground, tmp_path):
    run_dir = tmp_path / "redone"
    shutil.copytree(profiled, run_dir)
    again = ("--run-dir", str(run_dir), "coteaching.epochs=3")
    code, error = incv(playground, "run", *again, "--redo", "standard")
    assert code == 0, error
    assert ("standard", None, None) not in [name_of(entry) for entry in read_json(run_dir / FILE)]
    code, error = incv(playground, "run", *again, "--redo", "standard", "--profile", "trace")
    assert code == 0, error
    assert [path.parent.name for path in run_dir.rglob(profile_trace.FILE)] == ["standard"]
    (entry,) = (entry for entry in read_json(run_dir / FILE) if entry["stage"] == "standard")
    assert (entry["start"], entry["steps"]) == (2, 50)


def test_predict_passes_between_epochs_are_counted_as_such(playground, monkeypatch):
    """Those after each epoch; the one after the training is not part of it."""
    monkeypatch.setattr(SamplePass, "run", slowed(SamplePass.run))
    for stage in ("labels", "incv"):
        code, error = incv(playground, stage, "--run-dir", "judged", "--profile", "incv.rounds=1")
        assert code == 0, error
    epochs = 5
    entries = read_json(playground / "judged" / FILE)
    assert [name_of(entry) for entry in entries] == FOLDS[:2]
    for entry in entries:
        require_sound(entry)
        assert epochs * NAP < entry["seconds"]["predict"] < entry["wall_s"]
        assert entry["seconds"]["other"] < entry["seconds"]["predict"]


def test_both_starts_of_a_stopped_run_are_added_up(playground):
    run_dir = playground / "stopped"
    arguments = ("run", "--run-dir", str(run_dir), "--profile", *STANDARD_ALONE, "standard.epochs=15")
    metrics, ended = run_dir / "methods" / "standard" / "metrics.jsonl", threading.Event()

    def stop_in_the_middle():
        while not (metrics.exists() and metrics.read_text().count("\n") > 5):
            if ended.wait(0.005):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_in_the_middle)
    stopper.start()
    code, error = incv(playground, *arguments)
    ended.set()
    stopper.join()
    assert code == 75, error
    assert name_of(read_json(run_dir / FILE)[-1]) == ("standard", None, None)
    code, error = incv(playground, *arguments)
    assert code == 0, error
    entries = [entry for entry in read_json(run_dir / FILE) if entry["stage"] == "standard"]
    assert [entry["start"] for entry in entries] == [0, 1]
    for entry in entries:
        require_sound(entry)
    starts = read_json(run_dir / "manifest.json")["starts"]
    assert [entry["steps"] for entry in entries] == [start["steps_executed"]["standard"] for start in starts]
    shown = read_json(run_dir / "report.json")["profile"][-1]
    assert (shown["starts"], shown["steps"]) == (2, 150)
    assert shown["wall_s"] == pytest.approx(sum(entry["wall_s"] for entry in entries))
    for phase in PHASES:
        assert shown["seconds"][phase] == pytest.approx(sum(entry["seconds"][phase] for entry in entries))


def test_without_the_flag_nothing_of_it_exists_and_results_are_the_same(playground, profiled):
    code, error = incv(playground, "run", "--run-dir", "plain", *STANDARD_ALONE)
    assert code == 0, error
    assert list((playground / "plain").rglob(FILE)) == []
    assert read_json(playground / "plain" / "report.json")["profile"] is None
    assert "Time of each training by phase" not in (playground / "plain" / "report.html").read_text()
    last = "methods/standard/checkpoints/step-0000000050/tensors.safetensors"
    assert (playground / "plain" / last).read_bytes() == (profiled / last).read_bytes()


def test_one_stage_alone_is_measured_too(playground):
    for stage in ("labels", "standard"):
        code, error = incv(playground, stage, "--run-dir", "alone", "--profile")
        assert code == 0, error
    assert [name_of(entry) for entry in read_json(playground / "alone" / FILE)] == METHODS[:1]


# --- what counts as what ------------------------------------------------------------------------------------

ROWS, PLAN = 8, StaticPlan(stream=5, selected=np.arange(80), batch=8, epochs=1)
LONG = replace(PLAN, epochs=3)


class Napping(nn.Module):
    """A network that sleeps in its forward, or in its backward."""

    def __init__(self, forward=0.0, backward=0.0):
        super().__init__()
        self.linear, self.naps = nn.Linear(4, 3), (forward, backward)

    def forward(self, images):
        time.sleep(self.naps[0])
        logits = self.linear(images)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: time.sleep(self.naps[1]))
        return logits


def batches_from(first, nap=0.0, plan=PLAN):
    """Like a loader's, of a plan that was made ahead."""
    for at in plan.steps(first):
        time.sleep(nap)
        ids = torch.from_numpy(at.selected)
        yield Batch(ids, torch.ones(ROWS, 4), torch.ones(ROWS), step=at)


class Loop:
    """Trainings of one start, without a run around them."""

    def __init__(self, root, start=0, reason=lambda: None, plan=PLAN, trace=False):
        stop = SimpleNamespace(reason=reason, wait_for_reason=reason)
        execution, heartbeat = ExecutionConfig(checkpoint_every=4), Heartbeat(None, 0, 1, "alone")
        notes, profile = StartLog(RunDirectory(root), start), Profile(SINGLE_PROCESS.device, start, trace)
        self._root, self._plan = root, plan
        self._ctx = RunContext(SINGLE_PROCESS, execution, notes, stop, heartbeat, profile=profile)

    def arguments(self, name="standard", batch=0.0, **naps):
        task = StandardTask(
            Napping(**naps),
            TaskSettings(OptimizerConfig(), self._plan.schedule, torch.arange(80) % 3, SINGLE_PROCESS),
        )
        training = TrainingJob(name, self._root / "methods" / name)
        return training, task, lambda plans, first: batches_from(first, batch, self._plan), self._ctx

    def entries(self, name="standard"):
        return read_json(self._root / "methods" / name / FILE)


@pytest.mark.parametrize(
    ("phase", "naps"),
    [("data_wait", {"batch": NAP}), ("step", {"forward": NAP}), ("step", {"backward": NAP})],
)
def test_time_is_counted_where_it_was_spent(phase, naps, tmp_path):
    loop = Loop(tmp_path)
    train(*loop.arguments(**naps))
    (entry,) = loop.entries()
    slept = NAP * (PLAN.total_steps - 1)  # the first step is counted apart
    assert entry["seconds"][phase] >= slept
    assert entry["seconds"]["warm_up"] >= NAP
    elsewhere = [name for name in ("data_wait", "step") if name != phase]
    assert all(entry["seconds"][name] < slept for name in elsewhere)


@pytest.mark.parametrize("part", ["save", "wait"])
def test_time_that_checkpoints_take_is_counted_as_such(part, tmp_path, monkeypatch):
    """Those of steps 0, 2, 4, 6, 8 and 10, with what is waited for at the end."""
    monkeypatch.setattr(Checkpointer, part, slowed(getattr(Checkpointer, part)))
    loop = Loop(tmp_path)
    train(*loop.arguments())
    (entry,) = loop.entries()
    assert entry["seconds"]["checkpoint"] >= 6 * NAP
    assert entry["seconds"]["other"] < entry["seconds"]["checkpoint"]
    assert "predict" not in entry["seconds"]
    assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_s"], rel=0.02)


def test_reading_a_checkpoint_is_counted_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(train_loop, "find_newest_checkpoint", slowed(train_loop.find_newest_checkpoint))
    asked = iter(range(100))
    with pytest.raises(Stopped):
        train(*Loop(tmp_path, 0, lambda: "asked to" if next(asked) == 2 else None).arguments())
    train(*Loop(tmp_path, 1).arguments())
    assert [entry["start"] for entry in Loop(tmp_path).entries()] == [0, 1]
    assert all(entry["seconds"]["checkpoint"] >= NAP for entry in Loop(tmp_path).entries())


def test_a_training_does_not_count_the_turns_of_another(tmp_path):
    loop = Loop(tmp_path)
    pair = [loop.arguments("slow", batch=NAP), loop.arguments("fast")]
    run_to_end(interleave([iterate_training(*arguments) for arguments in pair], SINGLE_PROCESS.device))
    (slow,), (fast,) = loop.entries("slow"), loop.entries("fast")
    assert slow["wall_s"] - fast["wall_s"] > NAP * PLAN.total_steps / 2
    for entry in (slow, fast):
        assert entry["steps"] == PLAN.total_steps
        assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_s"], rel=0.02)


def test_a_trace_of_a_few_steps_on_request(tmp_path):
    loop = Loop(tmp_path, plan=LONG, trace=True)
    pair = [loop.arguments("one"), loop.arguments("other")]
    run_to_end(interleave([iterate_training(*arguments) for arguments in pair], SINGLE_PROCESS.device))
    for name in ("one", "other"):  # they take turns, and are traced one after the other
        events = json.loads((tmp_path / "methods" / name / profile_trace.FILE).read_text())["traceEvents"]
        named = [event.get("name", "") for event in events]
        assert sum(each.startswith("ProfilerStep#") for each in named if each) >= 3
        assert "aten::addmm" in named


def test_a_training_too_short_for_a_trace_has_none(tmp_path):
    short, long_ = Loop(tmp_path / "short", trace=True), Loop(tmp_path / "long", plan=LONG, trace=True)
    train(*short.arguments())
    train(*long_.arguments())
    assert len(list(tmp_path.rglob(profile_trace.FILE))) == 1  # nor does it keep the profiler from the next one


def test_an_entry_a_start_also_of_a_training_that_failed(tmp_path):
    asked = iter(range(100))
    with pytest.raises(Stopped):
        train(*Loop(tmp_path, 0, lambda: "asked to" if next(asked) == 2 else None).arguments())
    training, task, batches, ctx = Loop(tmp_path, 1).arguments()

    def broken(plans, first):
        for number, batch in enumerate(batches(plans, first)):
            if number == 3:
                raise OSError("the disk is gone")
            yield batch

    with pytest.raises(OSError, match="the disk is gone"):
        train(training, task, broken, ctx)
    last = Loop(tmp_path, 2)
    train(*last.arguments())
    assert [(entry["start"], entry["steps"]) for entry in last.entries()] == [(0, 3), (1, 3), (2, 4)]


@pytest.mark.parametrize("content", ["{", '{"stage": 1}', "[7]", '[{"stage": "standard"}]'])
def test_a_damaged_file_costs_a_profile_and_no_run(content, tmp_path):
    folder = tmp_path / "methods" / "standard"
    folder.mkdir(parents=True)
    (folder / FILE).write_text(content)
    loop = Loop(tmp_path)
    train(*loop.arguments())
    assert loop.entries()[-1]["steps"] == PLAN.total_steps
    merge_profiles(tmp_path, ("incv", "standard"))
    assert json.loads((tmp_path / FILE).read_text())[-1]["steps"] == PLAN.total_steps


def test_a_profile_that_cannot_be_written_costs_no_run(tmp_path, caplog):
    (tmp_path / "methods" / "standard" / FILE).mkdir(parents=True)
    train(*Loop(tmp_path).arguments())
    (warning,) = {record.levelname for record in caplog.records if "standard was not written" in record.message}
    assert warning == "WARNING"
    assert "the profile of standard was not written" in caplog.text


def test_entries_are_gathered_in_the_order_of_the_run(tmp_path):
    for round_ in (10, 9):
        entry = {"stage": "incv", "round": round_, "fold": 1, "start": 0}
        write_json(tmp_path / "rounds" / str(round_) / "fold1" / FILE, [entry | {"start": 1}, entry])
    write_json(tmp_path / "methods" / "standard" / FILE, [{"stage": "standard", "round": None, "fold": None}])
    merge_profiles(tmp_path, ("incv", "standard"))
    found = [(entry["stage"], entry["round"], entry.get("start")) for entry in read_json(tmp_path / FILE)]
    assert found == [("incv", 9, 0), ("incv", 9, 1), ("incv", 10, 0), ("incv", 10, 1), ("standard", None, None)]
