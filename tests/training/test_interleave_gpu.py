"""Trainings in lanes of one GPU with their own graphs, bitwise as if alone. `make test-gpu` runs these."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.toy_networks import TARGETS, schedule_of
from trainer.config.optimisation import OptimizerConfig
from trainer.distributed.world import World
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StepIds
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.training.interleave import interleave, run_to_end

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
GPU = torch.device("cuda", 0)
WORLD = World(0, 1, GPU, 1)
ROWS, CLASSES, PER_EPOCH = 32, 10, 5
LANES = ((1, 30), (2, 21), (3, 26))
"""Seed and steps of each training: they end one after the other."""
ADAM = OptimizerConfig(learning_rate=1e-3, milestones=((3, 3e-4),), warmup_epochs=1, weight_decay=1e-3)


class Dropping(nn.Module):
    def __init__(self, seed: int, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.body = nn.Sequential(
                *(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(dropout)),
                *(nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(dropout)),
            )
            self.head = nn.Linear(32, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


def batch_at(seed: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    images = torch.randn(ROWS, 3, 32, 32, generator=generator)
    return Batch(
        ids=torch.arange(ROWS, device=GPU),
        images=images.to(GPU, memory_format=torch.channels_last),
        weights=torch.ones(ROWS, device=GPU),
    )


def training(seed, steps, dropout, graphs=True):
    """Its losses, what it would draw next, and its weights and moments."""
    torch.manual_seed(seed)
    setting = TaskSettings(ADAM, schedule_of(PER_EPOCH), TARGETS, WORLD, graphs=graphs, require_graphs=graphs)
    task = StandardTask(Dropping(seed, dropout), setting)
    losses = []
    for step in range(steps):
        at = StepIds(step, step // PER_EPOCH, (np.arange(ROWS),))
        losses.append(task.step(batch_at(seed, step), at)["loss"].clone())  # read at the end: nobody waits
        yield
    state = {name: tensor.detach().cpu().clone() for name, tensor in task.state().tensors.items()}
    return torch.stack(losses).tolist(), torch.rand((), device=GPU).item(), state


def differing(one, other):
    """Names of the tensors that are not equal to the bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lanes_with_graphs_equal_one_after_the_other(dropout, at_once):
    alone = [run_to_end(training(seed, steps, dropout)) for seed, steps in LANES]
    trainings = [training(seed, steps, dropout) for seed, steps in LANES]
    together = run_to_end(interleave(trainings, GPU, at_once))
    for (losses, draw, state), (expected_losses, expected_draw, expected_state) in zip(together, alone, strict=True):
        assert losses == expected_losses
        assert draw == expected_draw
        assert differing(state, expected_state) == []
    assert len({losses[0] for losses, _, _ in alone}) == len(LANES)  # three different trainings


class DroppingLate(nn.Module):
    """Its draws are made when the GPU has computed for a while: other lanes' steps are launched long before."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.mixed = nn.Linear(2048, 2048, bias=False)
            self.head = nn.Linear(2048, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images.flatten(1)[:, :2048].repeat(64, 1)
        for _ in range(20):
            features = self.mixed(features).tanh()
        return self.head(nn.functional.dropout(features, 0.5)).view(64, ROWS, CLASSES).mean(0)


def late_training(seed):
    torch.manual_seed(seed)
    task = StandardTask(
        DroppingLate(seed),
        TaskSettings(ADAM, schedule_of(PER_EPOCH), TARGETS, WORLD, graphs=True, require_graphs=True),
    )
    losses = []
    batches = [batch_at(seed, step) for step in range(4)]
    for step, batch in enumerate(batches):
        losses.append(task.step(batch, StepIds(step, 0, (np.arange(ROWS),)))["loss"].clone())
        yield
    return torch.stack(losses).tolist()


def test_a_step_that_draws_late_draws_its_own():
    """Not what another lane, whose step was launched meanwhile, made ready for itself."""
    alone = [run_to_end(late_training(seed)) for seed in (1, 2, 3)]
    assert run_to_end(interleave([late_training(seed) for seed in (1, 2, 3)], GPU)) == alone


def test_dropout_was_at_work():
    """Without it, or with other draws, the lanes above would have ended elsewhere."""
    with_dropout, without = (run_to_end(training(1, 5, dropout)) for dropout in (0.4, 0.0))
    assert with_dropout[0] != without[0]
    first = run_to_end(training(1, 5, 0.4))
    assert first[:2] == with_dropout[:2]


def test_replayed_draws_are_those_of_eager_steps():
    replayed, eager = (run_to_end(training(1, 10, 0.4, graphs)) for graphs in (True, False))
    assert replayed[0] == pytest.approx(eager[0], rel=1e-5)
    assert replayed[1] == eager[1]
