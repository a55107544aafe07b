"""The loop: a stopped or killed training, resumed, ends with the bytes of an uninterrupted one."""

import json
import shutil
import time
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shards.errors import DataError
from tests.support.untimed import untimed
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig
from trainer.distributed.stop import Stopped
from trainer.distributed.world import World
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.sample_order import derive_stream
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import Manifest
from trainer.records.run_directory import RunDirectory
from trainer.training.checkpoint import TrainState, find_newest_checkpoint
from trainer.training.loop import RunContext, TrainingJob, checkpoint_interval, train

CPU = torch.device("cpu")
WORLD = World(0, 1, CPU, 1)
PLAN = StaticPlan(derive_stream(0, "toy"), np.arange(30), 7, 5, np.empty(0, np.int64))  # 5 epochs of 5 steps
TOTAL = 25
EXECUTION = ExecutionConfig(log_every=3, checkpoint_every=4)
DATA = torch.randn(30, 3, 2, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of small sums wait for each other longer than they add."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Killed(Exception):
    """The process dies: nothing of ours runs any more."""


class ToyTask:
    """One number that remembers every id it has seen and every random number it has drawn."""

    has_ended, epoch_metrics = False, MappingProxyType({})
    schedule, plans_ahead = PLAN.schedule, True

    def __init__(self, on_step=lambda at: None):
        self.learning_rate, self.chosen = 0.5, None
        self.value = torch.zeros((), dtype=torch.float64)
        self.epochs, self.steps = [], []
        self._on_step = on_step

    def require_finite(self, wait=True):
        assert torch.isfinite(self.value)

    def close(self):
        pass

    def step(self, batch, at):
        self._on_step(at)
        self.steps.append(at.step)
        self.value = self.value * 0.9 + torch.sin(batch.ids.double()).sum() + torch.rand(())
        self.learning_rate = 0.5 / (1 + at.step)
        return {"loss": self.value, "drawn": torch.rand(())}

    def plan_epoch(self, epoch):
        return PLAN.plan_epoch(epoch)

    def prepare_epoch(self, epoch):
        pass

    def after_epoch(self, epoch):
        return [lambda: self.epochs.append(epoch)]

    def state(self):
        return TrainState({"value": self.value}, {"epochs": self.epochs})

    def load(self, state):
        self.value, self.epochs = state.tensors["value"], state.values["epochs"]


def network_task(on_step=lambda at: None):
    """A real one: BatchNorm, Dropout (which draws), Adam."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3))

    class Watched(StandardTask):
        def step(self, batch, at):
            on_step(at)
            return super().step(batch, at)

    optimizer = OptimizerConfig(learning_rate=0.01, milestones=((2, 0.001),))
    return Watched(network, TaskSettings(optimizer, PLAN.schedule, torch.arange(30) % 3, WORLD, PLAN.plan_epoch))


def batches_from(plans, first):
    for plan in plans:
        for at in plan.steps(PLAN.schedule, first):
            ids = torch.from_numpy(at.selected)
            yield Batch(ids, DATA[ids], torch.ones(len(ids)), step=at)


def run(folder, task, stop_at=None, execution=EXECUTION, batches=batches_from):
    """One start of a run that trains and nothing else; stop_at: a stop is asked for during that step."""
    run_dir = RunDirectory(folder / "run")
    run_dir.root.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(run_dir)
    notes = manifest.begin("toy", WORLD, {"methods": 7}, "the code")
    polls = []

    def reason():
        polls.append(1)
        return "SIGTERM" if stop_at is not None and len(polls) >= stop_at else None

    torch.manual_seed(3)
    stop = SimpleNamespace(reason=reason, wait_for_reason=reason)
    ctx = RunContext(WORLD, execution, notes, stop, Heartbeat(None, 0, 1, "alone"))
    try:
        train(TrainingJob("toy", folder), task, batches, ctx)
    finally:
        manifest.end("here")
    return manifest.start


def ended(folder):
    """What a training leaves: its log, and its last checkpoint's tensors and values."""
    step, state = find_newest_checkpoint(folder / "checkpoints")
    tensors = {name: tensor.numpy().tobytes() for name, tensor in state.tensors.items()}
    return untimed(folder / "metrics.jsonl"), step, tensors, state.values


TASKS = {"toy": ToyTask, "network": network_task}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    for name, build in TASKS.items():
        run(folder / name, build())
    return {name: ended(folder / name) for name in TASKS}


def test_an_undisturbed_training(tmp_path):
    task = ToyTask()
    start = run(tmp_path, task)
    assert task.steps == list(range(TOTAL))
    assert task.epochs == list(range(5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6, 9, 12, 15, 18, 21, 24, 25]
    assert [line["epoch"] for line in lines[:3]] == [0.2, 0.6, 1.2]
    assert lines[-1]["learning_rate"] == 0.5 / 25
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == TOTAL
    assert start["steps_executed"] == {"toy": TOTAL}
    assert start["resumed_from"] is None


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("step", [1, 4, 5, 7, 24])
def test_a_stopped_training_goes_on_as_if_it_had_not_been(kind, step, tmp_path, uninterrupted):
    with pytest.raises(Stopped, match=rf"toy at step {step} \(SIGTERM\)"):
        run(tmp_path, TASKS[kind](), stop_at=step)
    assert find_newest_checkpoint(tmp_path / "checkpoints")[0] == step  # durable before Stopped is raised
    start = run(tmp_path, TASKS[kind]())
    assert ended(tmp_path) == uninterrupted[kind]
    assert start["resumed_from"] == {"stage": "toy", "round": None, "fold": None, "step": step}
    assert start["steps_executed"] == {"toy": TOTAL - step}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("step", [0, 3, 10, 14, 24])
def test_a_killed_training_goes_on_from_its_checkpoint(kind, step, tmp_path, uninterrupted):
    def die(at):
        if at.step == step:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, TASKS[kind](die))
    from_step = find_newest_checkpoint(tmp_path / "checkpoints")[0]
    assert step - from_step <= TOTAL / 5
    start = run(tmp_path, TASKS[kind]())
    assert ended(tmp_path) == uninterrupted[kind]
    assert start["resumed_from"]["step"] == from_step
    assert start["steps_executed"] == {"toy": TOTAL - from_step}


def test_a_training_stopped_again_and_again(tmp_path, uninterrupted):
    starts = 0
    while True:
        starts += 1
        try:
            run(tmp_path, ToyTask(), stop_at=4)
            break
        except Stopped:
            assert starts < 20
    assert starts == 7
    assert ended(tmp_path) == uninterrupted["toy"]


@pytest.mark.parametrize("log_every", [1, 25, 1000])
def test_an_unfinished_mean_survives_any_log_interval(log_every, tmp_path):
    execution = ExecutionConfig(log_every=log_every, checkpoint_every=4)
    run(tmp_path / "whole", ToyTask(), execution=execution)
    with pytest.raises(Stopped):
        run(tmp_path / "parts", ToyTask(), stop_at=7, execution=execution)
    run(tmp_path / "parts", ToyTask(), execution=execution)
    assert ended(tmp_path / "whole") == ended(tmp_path / "parts")


def test_the_checkpoint_of_step_0_comes_before_everything_else(tmp_path):
    found = []

    def look(at):
        if at.step == 0:
            found.append(find_newest_checkpoint(tmp_path / "checkpoints"))
            assert not (tmp_path / "metrics.jsonl").exists()

    run(tmp_path, ToyTask(look), execution=ExecutionConfig(log_every=1))
    assert found[0][0] == 0
    assert found[0][1].tensors["value"] == 0


def test_progress_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(Stopped):
        run(tmp_path, ToyTask(), stop_at=10)
    shutil.rmtree(tmp_path / "checkpoints")
    task, before = ToyTask(), (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl.*no readable checkpoint.*--redo toy"):
        run(tmp_path, task)
    assert task.steps == []
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "checkpoints").exists()


def test_without_progress_a_training_without_checkpoints_begins_anew(tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        run(tmp_path, ToyTask(), stop_at=2)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(DataError):  # the first step is logged, however rarely the others are
        run(tmp_path, ToyTask())
    (tmp_path / "metrics.jsonl").unlink()
    run(tmp_path, ToyTask())
    assert ended(tmp_path) == uninterrupted["toy"]


def test_a_damaged_newest_checkpoint_costs_its_interval_only(tmp_path, uninterrupted):
    with pytest.raises(Stopped):
        run(tmp_path, ToyTask(), stop_at=11)
    (tmp_path / "checkpoints" / "step-0000000011" / "state.json").write_text("")
    start = run(tmp_path, ToyTask())
    assert start["resumed_from"]["step"] == 8
    assert ended(tmp_path) == uninterrupted["toy"]


def test_a_finished_training_is_not_trained_again(tmp_path, uninterrupted):
    run(tmp_path, ToyTask())
    task = ToyTask()
    run(tmp_path, task)
    assert task.steps == []
    assert ended(tmp_path) == uninterrupted["toy"]


def test_a_stop_during_the_last_step_is_an_end(tmp_path, uninterrupted):
    run(tmp_path, ToyTask(), stop_at=TOTAL)
    assert ended(tmp_path) == uninterrupted["toy"]


def test_a_loader_that_ends_early_is_an_error(tmp_path):
    def too_few(plans, first):
        for number, batch in enumerate(batches_from(plans, first)):
            if number < 20:
                yield batch

    with pytest.raises(AssertionError, match="too few"):
        run(tmp_path, ToyTask(), batches=too_few)


@pytest.mark.parametrize("end", ["stop", "failure", "last step"])
def test_batches_are_closed_however_a_training_ends(end, tmp_path):
    """Threads and decoders stand behind them, and the error that ended it may live for long."""
    closed = []

    def watched(plans, first):
        try:
            yield from batches_from(plans, first)
        finally:
            closed.append(end)

    def fail(at):
        if end == "failure" and at.step == 7:
            raise EOFError

    expected = {"stop": pytest.raises(Stopped), "failure": pytest.raises(EOFError), "last step": nullcontext()}
    with expected[end] as error:
        run(tmp_path, network_task(fail), stop_at=7 if end == "stop" else None, batches=watched)
    assert closed == [end], error


@pytest.mark.parametrize(("step", "before"), [(2, 0), (24, 20)])
def test_a_checkpoint_that_cannot_be_written_ends_the_training(step, before, tmp_path):
    """Also the last one, which no later write waits for."""
    folder = tmp_path / "checkpoints"

    def in_the_way(at):
        if at.step != step:
            return
        for _ in range(200):  # the write before is done
            time.sleep(0.05)
            if (folder / "latest").read_text() == f"step-{before:010d}\n":
                break
        while folder.exists():  # the writer may be removing an old checkpoint
            shutil.rmtree(folder, ignore_errors=True)
        folder.write_text("")

    with pytest.raises(DataError, match="checkpoints is a file"):
        run(tmp_path, ToyTask(in_the_way), execution=ExecutionConfig(checkpoint_every=5))


@given(st.integers(1, 10**6), st.integers(1, 10**6))
@settings(max_examples=60, deadline=None)
def test_at_most_a_fifth_of_a_training_is_at_stake(total, every):
    interval = checkpoint_interval(total, every)
    assert 1 <= interval <= every
    assert interval == 1 or interval * 5 <= total


@pytest.mark.parametrize(
    ("total", "every", "interval"), [(25, 4, 4), (25, 1000, 5), (4, 1000, 1), (10_000, 1000, 1000), (100, 7, 7)]
)
def test_checkpoint_intervals_by_hand(total, every, interval):
    assert checkpoint_interval(total, every) == interval


def test_a_fold_is_named_by_round_and_number(tmp_path):
    assert TrainingJob("incv", tmp_path, 1, 0).name == "incv/1/0"
    assert TrainingJob("standard", tmp_path).name == "standard"
