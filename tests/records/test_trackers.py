"""Experiment trackers: only what metrics.jsonl has, one log over several starts, no failure of a run."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shards.errors import ConfigError
from trainer.records import trackers as module
from trainer.records.metrics import MetricsLog
from trainer.records.trackers import JobTrackers, TrackerSettings, require_trackers


class Recorder:
    """A tracker that remembers what it was given."""

    name = "recorder"

    def __init__(self, fails_at: int | None = None) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.finished = fails_at, False

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise OSError("no space")
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_a_tracker_is_given_the_lines_of_the_metrics(tmp_path: Path) -> None:
    recorder = Recorder()
    metrics = MetricsLog(tmp_path / "metrics.jsonl")
    metrics.on_line = JobTrackers([recorder]).log
    metrics.add({"loss": torch.tensor(2.0), "broken": torch.tensor(torch.nan)})
    metrics.write(step=1, epoch=0.5, learning_rate=0.1)
    assert recorder.lines == [(1, {"epoch": 0.5, "learning_rate": 0.1, "loss": 2.0})]


def test_ranks_that_write_no_metrics_log_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    metrics = MetricsLog(tmp_path / "metrics.jsonl", writes=False)
    metrics.on_line = JobTrackers([recorder]).log
    metrics.write(step=1, epoch=0.5)
    assert recorder.lines == []


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on() -> None:
    failing, well = Recorder(fails_at=2), Recorder()
    both = JobTrackers([failing, well])
    for step in (1, 2, 3):
        both.log({"step": step, "loss": 1.0})
    both.close()
    assert [step for step, _ in failing.lines] == [1]
    assert [step for step, _ in well.lines] == [1, 2, 3]
    assert (failing.finished, well.finished) == (False, True)


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"incv\[wandb\]"):
        require_trackers(["wandb"])
    require_trackers([])


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.lines, self.finished = settings, [], False

    def log(self, values: dict[str, float], step: int | None = None, **_more: Any) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Runs that a stand-in for the package wandb has started."""
    import accelerate.tracking  # noqa: F401  looks for wandb when it is first imported

    runs: list[FakeRun] = []
    wandb = ModuleType("wandb")

    def init(**settings: Any) -> FakeRun:
        runs.append(FakeRun(settings))
        return runs[-1]

    wandb.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return runs


def test_wandb_is_offline_and_keeps_its_id_over_starts(
    tmp_path: Path, wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrackerSettings(("wandb",), tmp_path / "run", "tiny", {"seed": 0})
    threads = torch.get_num_threads()
    for job, step in (("standard", 0), ("standard", 5), ("incv/0/1", 0)):
        opened = settings.open(job, step, "keys")
        opened.log({"step": step + 1, "loss": 0.5})
        opened.close()
    first, again, other = wandb_runs
    assert first.settings["mode"] == "offline"
    assert first.settings["project"] == "incv-tiny"
    assert first.settings["config"] == {"seed": 0}
    assert first.settings["id"] == again.settings["id"] != other.settings["id"]
    assert (first.lines, again.lines) == ([(1, {"loss": 0.5})], [(6, {"loss": 0.5})])
    assert all(run.finished for run in wandb_runs)
    assert torch.get_num_threads() == threads
    monkeypatch.setenv("WANDB_MODE", "online")
    settings.open("standard", 0, "keys")
    assert wandb_runs[-1].settings["resume"] == "allow"


def test_tensorboard_hides_the_steps_that_are_repeated(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = TrackerSettings(("tensorboard",), tmp_path, "tiny")
    for first, last, loss in ((0, 4, 1.0), (2, 5, 2.0)):  # killed after step 4, resumed from step 2
        opened = settings.open("incv/0/1", first)
        for step in range(first + 1, last + 1):
            opened.log({"step": step, "loss": loss})
        opened.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "incv" / "0" / "1"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        *((step, 1.0) for step in (1, 2)),
        *((step, 2.0) for step in (3, 4, 5)),
    ]
