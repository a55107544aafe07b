"""A step that cannot be captured falls back to eager with a warning. `make test-gpu` runs these."""

import pytest
import torch
from torch import nn

from shards.errors import ConfigError
from tests.support.fast_steps import (
    CLASSES,
    KINDS,
    OPTIMIZERS,
    ROWS,
    SCHEDULE,
    TARGETS,
    batch_at,
    furthest,
    position,
    task_of,
    told,
)
from trainer.distributed.world import World
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.models.twin import TwinModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
STEPS = range(10, 30)
"""With the empty batch, the one with NaN, the short one, and another shape from step 25 on."""


@pytest.fixture(autouse=True)
def same_stream():
    """The current one is put back."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        yield


class Looking(nn.Module):
    """It reads a number back to the host in its forward, and computes with it."""

    def __init__(self, seed: int, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout))
            self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.body(images)
        largest = features.detach().abs().amax().item()
        return self.head((features / (1 + largest)).mean((2, 3)))


def looking_task(kind, dropout=0.0, **form):
    setting = TaskSettings(OPTIMIZERS["sgd"], SCHEDULE, TARGETS, WORLD, **form)
    if kind == "standard":
        return StandardTask(Looking(1, dropout), setting)
    pair = TwinModel(Looking(1, dropout), Looking(2, dropout))
    return CoteachingTask(pair, setting, ForgetSchedule(ROWS, 0.5, 6), kind)


def assert_same_story(ours, theirs):
    assert ours.chosen == theirs.chosen
    assert ours.counts == theirs.counts
    for one, other in zip(ours.values, theirs.values, strict=True):
        assert one == pytest.approx(other, rel=1e-6, nan_ok=True)
    assert furthest(ours, theirs) < 1e-6


def warnings_in(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_eagerly_and_says_so_once(kind, capsys):
    eager = told(looking_task(kind), STEPS)
    assert warnings_in(capsys) == []
    tried = told(looking_task(kind, graphs=True), STEPS)
    (warning,) = warnings_in(capsys)
    assert "cannot be captured" in warning
    assert eager.counts["guard"] == {"skipped": 1, "in_a_row": 0}
    assert_same_story(tried, eager)


def test_it_goes_on_eagerly_where_a_recording_has_no_memory(monkeypatch, capsys):
    """Eager steps take no more than those before them did."""
    eager = told(task_of("standard", WORLD), range(4))
    task = task_of("standard", WORLD, graphs=True)
    forward = task.module.forward

    def greedy(images):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(2**50, dtype=torch.uint8, device=WORLD.device)
        return forward(images)

    monkeypatch.setattr(task.module, "forward", greedy)
    tried = told(task, range(4))
    (warning,) = warnings_in(capsys)
    assert "memory" in warning
    assert_same_story(tried, eager)


def test_what_was_tried_draws_nothing():
    """Dropout drops what it would have dropped."""
    torch.manual_seed(0)
    eager = told(looking_task("standard", dropout=0.3), range(5))
    torch.manual_seed(0)
    tried = told(looking_task("standard", dropout=0.3, graphs=True), range(5))
    assert_same_story(tried, eager)
    torch.manual_seed(1)
    assert furthest(told(looking_task("standard", dropout=0.3), range(5)), eager) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_two_streams_used_is_free_again_afterwards(kind):
    """torch puts that off for as long as a capture seems to be under way."""
    looking_task(kind, graphs=True).step(batch_at(0, WORLD.device), position(0))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(WORLD.device)["active_bytes.all.current"]
    other, size = torch.cuda.Stream(), 64 << 20
    for _ in range(8):
        shared = torch.empty(size, dtype=torch.uint8, device=WORLD.device)
        shared.record_stream(other)
        del shared
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats(WORLD.device)["active_bytes.all.current"] < before + 2 * size


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_keeps_its_stream(kind):
    """torch leaves its capturing stream the current one where the capture fails."""
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.current_stream()
        task = looking_task(kind, graphs=True)
        task.step(batch_at(0, WORLD.device), position(0))
        assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_that_were_asked_for_are_an_error(kind):
    task = looking_task(kind, graphs=True, require_graphs=True)
    with pytest.raises(ConfigError, match=r"execution\.graphs is true") as refused:
        task.step(batch_at(0, WORLD.device), position(0))
    assert "auto" in str(refused.value)  # what to set instead


@pytest.mark.parametrize("kind", KINDS)
def test_another_task_is_recorded_afterwards(kind):
    eager = told(task_of(kind, WORLD), range(20, 30))
    told(looking_task(kind, graphs=True), range(2))
    assert_same_story(told(task_of(kind, WORLD, graphs=True, require_graphs=True), range(20, 30)), eager)
