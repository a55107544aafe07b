"""Data wait and step time of steps replayed on a GPU, with no host-device sync. `make test-gpu` runs these."""

import time

import pytest
import torch

from shards.durable import read_json
from tests.support.fast_steps import KINDS, batch_at, position, task_of
from trainer.distributed.world import World
from trainer.records.profile import FILE, Stopwatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
STEPS = 100


def profiled(kind, folder, steps, nap=0.0):
    """Seconds by phase of some steps, and as events around each step but the first say, in all."""
    watch = Stopwatch(WORLD.device, 0)
    task, batch = task_of(kind, WORLD, graphs=True), batch_at(0, WORLD.device)

    def batches():
        for _ in range(steps):
            time.sleep(nap)
            yield batch

    ctx = []
    watch.begin()
    try:
        for given in watch.time_each(batches()):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            task.step(given, position(0))
            ended.record()
            watch.end_step()
            ctx.append((began, ended))
            torch.cuda.set_sync_debug_mode("error")  # once the first step has been captured
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    watch.write(folder, "standard", None, None)
    (entry,) = read_json(folder / FILE)
    assert entry["steps"] == steps
    assert sum(entry["seconds"].values()) == pytest.approx(entry["wall_s"], rel=0.02)
    return entry["seconds"], sum(began.elapsed_time(ended) for began, ended in ctx[1:]) / 1000


@pytest.mark.parametrize("kind", KINDS)
def test_step_time_is_that_of_the_replayed_steps(kind, tmp_path):
    seconds, stepped = profiled(kind, tmp_path, STEPS)
    assert seconds["warm_up"] > 0
    assert seconds["step"] == pytest.approx(stepped, rel=0.25)
    assert seconds["data_wait"] < 0.1 * seconds["step"]  # the batch was always there


def test_a_gpu_that_waits_for_batches_says_so(tmp_path):
    nap = 0.05
    seconds, stepped = profiled("standard", tmp_path, 10, nap)
    waited = seconds["data_wait"]
    assert nap * 9 - stepped < waited < nap * 9 * 1.5
    assert waited > seconds["step"]
