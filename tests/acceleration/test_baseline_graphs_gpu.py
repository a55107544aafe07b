"""Steps of the paper's baselines replayed from CUDA graphs equal eager ones. `make test-gpu` runs these on a GPU."""

import pytest
import torch

from tests.support.fast_steps import MEASURES, furthest, task_of, told
from tests.support.graph_ranks import assert_same_values, told_by
from tests.support.graph_ranks import furthest as furthest_weights
from trainer.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
STEPS = 50
each_kind = pytest.mark.parametrize("kind", MEASURES)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@each_kind
def test_replayed_steps_are_the_eager_ones(kind, optimizer):
    """50 steps: a warm-up, a milestone, all phases of the curriculum, lost rows, an empty batch, NaN."""
    eager = told(task_of(kind, WORLD, optimizer), range(STEPS))
    replayed = told(task_of(kind, WORLD, optimizer, graphs=True), range(STEPS))
    assert replayed.counts == eager.counts
    assert eager.counts["guard"] == {"skipped": 1, "in_a_row": 0}
    for ours, theirs in zip(replayed.values, eager.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)
    assert len({values[MEASURES[kind]] for values in eager.values}) > 5


@each_kind
def test_smoothing_and_the_average_of_weights_are_part_of_the_recording(kind):
    form = {"label_smoothing": 0.1, "ema_decay": 0.9}
    eager = told(task_of(kind, WORLD, **form), range(STEPS))
    assert furthest(told(task_of(kind, WORLD, graphs=True, **form), range(STEPS)), eager) == pytest.approx(
        0, abs=1e-6
    )


@each_kind
def test_bf16_and_compiled_blocks_stay_close(kind):
    """Other kernels, other rounding: the losses of the first steps agree to what bf16 resolves.

    Rounding changes which rows two networks disagree on, and the loss by such a row.
    """
    eager = told(task_of(kind, WORLD, precision="bf16"), range(8), torch.bfloat16)
    fast = told(task_of(kind, WORLD, graphs=True, compile=True, precision="bf16"), range(8), torch.bfloat16)
    for ours, theirs in zip(fast.values, eager.values, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.1)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return told_by(2, tmp_path_factory.mktemp("ranks"), tuple(MEASURES))


@each_kind
def test_graphs_of_two_ranks_do_what_ddp_does(kind, ranks):
    for told_by_rank in ranks:
        replayed, ddp = told_by_rank[f"{kind} graphs"], told_by_rank[f"{kind} eager"]
        assert replayed["guard"] == ddp["guard"] == {"skipped": 1, "in_a_row": 0}
        assert furthest_weights(ddp["last"], ddp["first"]) > 0.01  # it did learn
        assert furthest_weights(replayed["last"], ddp["last"]) < 1e-5
        assert_same_values(replayed, ddp, rel=1e-5)
    one, other = (told_by_rank[f"{kind} graphs"] for told_by_rank in ranks)
    assert furthest_weights(one["last"], other["last"]) == 0.0
