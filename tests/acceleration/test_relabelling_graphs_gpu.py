"""The step of a method that relabels every epoch: replayed from CUDA graphs, with no host-device sync in an epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.fast_steps import (
    CLASSES,
    OPTIMIZERS,
    PER_EPOCH,
    SAMPLES,
    SCHEDULE,
    TARGETS,
    Story,
    batch_at,
    furthest,
    position,
    told,
)
from tests.support.relabel_package.incv_relabel import RelabelConfig, RelabelTask
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids
from trainer.methods.task import TaskSettings
from trainer.models.factory import create_model
from trainer.passes import Status
from trainer.passes.table import SampleTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
CONFIG = RelabelConfig(epochs=SCHEDULE.epochs, warm_epochs=1, threshold=0.5, neighbours=5)
EPOCHS = range(4)


@dataclass
class MadeUpPasses:
    """Gives other features and probabilities in every pass; one sample in seven cannot be read."""

    calls: int = 0

    def run(self, networks: nn.Module, ids: Ids, outputs: Sequence[str], doing: str) -> SampleTable:
        assert outputs == ("features", "probabilities")
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        status = torch.full((len(ids),), int(Status.OK), dtype=torch.int8)
        status[::7] = int(Status.UNREADABLE)
        columns = {
            "features": torch.randn(len(ids), 16, generator=generator),
            "probabilities": (3 * torch.randn(len(ids), CLASSES, generator=generator)).softmax(1),
            "status": status,
        }
        for name in ("features", "probabilities"):
            columns[name][::7] = torch.nan
        return SampleTable(torch.from_numpy(ids), columns).to(WORLD.device)


def task_of(graphs: bool, **form: Any) -> RelabelTask:
    given = F.one_hot(TARGETS, CLASSES).float()
    setting = TaskSettings(OPTIMIZERS["sgd"], SCHEDULE, given, WORLD, graphs=graphs, require_graphs=graphs, **form)
    return RelabelTask(create_model("cifar_resnet20", CLASSES, 1), setting, CONFIG, MadeUpPasses())  # type: ignore[arg-type]


def told_by_epochs(task: RelabelTask) -> Story:
    story = Story()
    for epoch in EPOCHS:
        task.prepare_epoch(epoch)
        part = told(task, range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH), mixed=True)
        story.values += part.values
        story.state, story.counts = part.state, part.counts
    return story


def test_replayed_steps_follow_the_targets_of_their_epoch() -> None:
    eager, replayed = told_by_epochs(task_of(False)), told_by_epochs(task_of(True))
    assert eager.counts == replayed.counts
    for ours, theirs in zip(replayed.values, eager.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)
    targets, keep = replayed.state["table.targets"], replayed.state["table.keep"]
    assert 0 < int((targets.argmax(1) != TARGETS).sum()) < SAMPLES
    assert 0 < int(keep.sum()) < SAMPLES
    assert not keep[::7].any()
    assert torch.equal(targets[::7].argmax(1), TARGETS[::7])


@pytest.mark.parametrize("graphs", [True, False])
def test_an_epoch_waits_for_nothing(graphs: bool) -> None:
    """In bf16; the first step of the first epoch may be captured, and work between epochs may wait."""
    task = task_of(graphs, precision="bf16")
    for epoch in EPOCHS:
        task.prepare_epoch(epoch)
        assert len(task.plan_epoch(epoch).parts[0].ids) == PER_EPOCH * SCHEDULE.rows // 2
        steps = range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH)
        made = [(batch_at(step, task.device, torch.bfloat16, mixed=True), position(step)) for step in steps]
        if epoch == 0:
            task.step(*made.pop(0))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch, at in made:
                task.step(batch, at)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    task.require_finite()
