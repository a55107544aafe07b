"""What --profile writes, and what it leaves alone."""

import json
import os

import numpy as np
import torch
from torch import nn

from tests.support import processes
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig
from trainer.distributed.stop import StopRequest
from trainer.distributed.world import SINGLE_PROCESS
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StaticPlan
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.records import profile_trace
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import StartLog
from trainer.records.profile_trace import FILE
from trainer.records.run_directory import RunDirectory
from trainer.training.interleave import interleave, run_to_end
from trainer.training.loop import RunContext, TrainingJob, iterate_training, train

ROWS = 8


def test_a_run_with_a_trace_has_the_results_of_one_without(tmp_path):
    playground = processes.pack_digits(tmp_path)
    alone = ("methods=[standard]", "incv=null", "-c", str(processes.RECIPE), *processes.EXECUTION)
    commands = {"plain": [], "traced": ["--profile"], "also_traced": ["--profile", "trace"]}
    for name, options in commands.items():
        with processes.own_process_state():
            os.chdir(playground)
            code, error = processes.run_here(["run", "--run-dir", name, *options, *alone])
        assert code == 0, error
    written = [path.relative_to(playground).parts for path in sorted(playground.rglob(FILE))]
    assert written == [(name, "methods", "standard", FILE) for name in ("also_traced", "traced")]
    last = "methods/standard/checkpoints/step-0000000050/tensors.safetensors"
    assert len({(playground / name / last).read_bytes() for name in commands}) == 1


def arguments(root, name="standard", epochs=3):
    """Those of `train`, for a tiny training that is traced."""
    plan = StaticPlan(stream=5, selected=np.arange(80), batch=ROWS, epochs=epochs)
    settings = TaskSettings(OptimizerConfig(), plan.schedule, torch.arange(80) % 3, SINGLE_PROCESS)
    run = RunDirectory(root)
    heartbeat, stop = Heartbeat(None, 0, 1, "alone"), StopRequest(root)
    ctx = RunContext(SINGLE_PROCESS, ExecutionConfig(), StartLog(run, 0), stop, heartbeat, profile=True)

    def batches(plans, first):
        for at in plan.steps(first):
            yield Batch(torch.from_numpy(at.selected), torch.ones(ROWS, 4), torch.ones(ROWS), step=at)

    return TrainingJob(name, run.method(name)), StandardTask(nn.Linear(4, 3), settings), batches, ctx


def test_trainings_that_take_turns_are_traced_one_after_the_other(tmp_path):
    pair = [iterate_training(*arguments(tmp_path, name)) for name in ("one", "other")]
    run_to_end(interleave(pair, SINGLE_PROCESS.device))
    for name in ("one", "other"):
        events = json.loads((tmp_path / "methods" / name / FILE).read_text())["traceEvents"]
        named = [event.get("name", "") for event in events]
        assert sum(each.startswith("ProfilerStep#") for each in named if each) >= 3
        assert "aten::addmm" in named


def test_a_training_too_short_for_a_trace_has_none(tmp_path):
    train(*arguments(tmp_path / "short", epochs=1))
    train(*arguments(tmp_path / "long"))
    assert len(list(tmp_path.rglob(FILE))) == 1  # nor does it keep the profiler from the next one


def test_a_profiler_that_fails_costs_no_run(tmp_path, monkeypatch, caplog):
    def refuse(**options):
        raise RuntimeError("another profiler is attached")

    monkeypatch.setattr(profile_trace, "profile", refuse)
    train(*arguments(tmp_path))
    (warning,) = (record for record in caplog.records if "another profiler is attached" in record.message)
    assert warning.levelname == "WARNING"
