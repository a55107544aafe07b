"""Fill rows that repeat real images leave BatchNorm statistics unchanged; zero rows would not."""

import copy

import numpy as np
import pytest
import torch

from shards.pack import pack
from shards.sources import open_source
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.loading.epoch_plan import StaticPlan
from trainer.loading.image_set import open_image_set
from trainer.loading.sample_order import derive_stream
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.models.factory import create_model

CPU = torch.device("cpu")
BATCH, LAST = 64, 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of small sums wait for each other longer than they add."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    index = pack(open_source("digits", None, "train"), tmp_path_factory.mktemp("digits") / "shards")
    image = ImageConfig(size=8, pad=1, flip=False, mean=(0.3, 0.3, 0.3), std=(0.35, 0.35, 0.35))
    ids = index.usable_ids()
    return open_image_set(index, ids, index.label.astype(np.int64), image, ExecutionConfig(), CPU)


def running_variances(module):
    return torch.cat([t.flatten() for name, t in module.state_dict().items() if name.endswith("running_var")])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_last_batch_changes_the_variances_by_less_than_5_percent(digits, seed):
    """One epoch of 22 steps whose last has 3 real rows, held against the same epoch without that step."""
    ids = digits.ids[: 21 * BATCH + LAST]
    plan = StaticPlan(derive_stream(seed, "standard"), ids, BATCH, 1, np.empty(0, np.int64))
    setting = TaskSettings(
        OptimizerConfig(learning_rate=0.002), plan.schedule, torch.from_numpy(digits.labels), SINGLE_PROCESS
    )
    task = StandardTask(create_model("digits_cnn", 10, seed), setting)
    batches = digits.training_batches(plan.schedule, plan.plans(), 0, World(0, 1, CPU, 1))
    steps = list(zip(plan.steps(), batches, strict=True))
    for at, batch in steps[:-1]:
        assert batch.weights.all()
        task.step(batch, at)
    at, last = steps[-1]
    assert last.weights.sum() == LAST
    assert len(last.images) == BATCH
    without, zeros = running_variances(task.module), copy.deepcopy(task.module)

    def change(module):
        return float((running_variances(module) - without).norm() / without.norm())

    task.step(last, at)
    assert 0 < change(task.module) < 0.05

    zeroed = last.images.clone()
    zeroed[last.weights == 0] = 0
    zeros.train()(zeroed)
    assert change(zeros) > 0.05
