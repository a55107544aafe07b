"""A step replayed from CUDA graphs equals the eager step. `make test-gpu` runs these on a GPU."""

import pytest
import torch

from tests.support.fast_steps import (
    KINDS,
    MEASURES,
    batch_at,
    furthest,
    position,
    step_without_waiting,
    task_of,
    told,
)
from trainer.distributed.world import World
from trainer.training.checkpoint import Checkpointer, find_newest_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.usefixtures("exact_kernels"),
]
WORLD = World(0, 1, torch.device("cuda", 0), 1)
STEPS = 50
every_kind = pytest.mark.parametrize("kind", [*KINDS, *MEASURES])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_rate_kept_rows_and_weights_change_after_the_recording(kind, optimizer):
    """50 steps: a warm-up, a milestone, n(e) falling to a half, rows of C coming, lost rows, an empty batch, NaN."""
    eager = told(task_of(kind, WORLD, optimizer), range(STEPS))
    replayed = told(task_of(kind, WORLD, optimizer, graphs=True), range(STEPS))
    assert replayed.chosen == eager.chosen
    assert replayed.counts == eager.counts
    assert eager.counts["guard"] == {"skipped": 1, "in_a_row": 0}
    for ours, theirs in zip(replayed.values, eager.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)
    if kind != "standard":
        assert len({values["kept"] for values in eager.values}) > 6  # n(e) did change


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_of_weights_is_part_of_the_recording(kind):
    eager = told(task_of(kind, WORLD, ema_decay=0.9, ema_buffers=True), range(STEPS))
    replayed = told(task_of(kind, WORLD, ema_decay=0.9, ema_buffers=True, graphs=True), range(STEPS))
    assert any(name.startswith("ema.") for name in replayed.state)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_trains_the_classifier_alone(kind, optimizer):
    """The features, BatchNorm statistics included, do not change; the classifier moves as in eager steps."""
    eager = told(task_of(kind, WORLD, optimizer, classifier_only=True), range(STEPS))
    task = task_of(kind, WORLD, optimizer, classifier_only=True, graphs=True)
    before = {name: tensor.clone() for name, tensor in task.module.state_dict().items()}
    replayed = told(task, range(STEPS))
    assert replayed.chosen == eager.chosen
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)
    changed = {name for name, tensor in task.module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.rsplit(".", 2)[-2] for name in changed} == {"fc"}


def test_mixed_and_smoothed_labels_are_part_of_the_recording():
    form = {"label_smoothing": 0.1, "ema_decay": 0.9, "ema_buffers": True}
    eager = told(task_of("standard", WORLD, "adamw", **form), range(STEPS), mixed=True)
    replayed = told(task_of("standard", WORLD, "adamw", graphs=True, **form), range(STEPS), mixed=True)
    assert furthest(replayed, eager) == pytest.approx(0, abs=1e-6)
    plain = told(task_of("standard", WORLD, "adamw", **form), range(STEPS))
    assert furthest(plain, eager) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_and_compiled_blocks_stay_close(kind):
    """Other kernels, other rounding: the losses of the first steps agree to what bf16 resolves."""
    form = {"precision": "bf16"}
    eager = told(task_of(kind, WORLD, **form), range(10), torch.bfloat16)
    fast = told(task_of(kind, WORLD, graphs=True, compile=True, **form), range(10), torch.bfloat16)
    for ours, theirs in zip(fast.values, eager.values, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.03)


@pytest.mark.parametrize("micro", [None, 8])
@pytest.mark.parametrize("kind", ["standard", "eval_first", "decoupling"])
def test_a_batch_in_parts_is_replayed_in_parts(kind, micro):
    eager = told(task_of(kind, WORLD, micro=micro), range(12))
    assert furthest(told(task_of(kind, WORLD, micro=micro, graphs=True), range(12)), eager) < 1e-6


@every_kind
def test_saved_loaded_and_continued_after_the_recording(kind, tmp_path):
    """Into the task that was recorded, which has gone on meanwhile, and into a new one: as if never stopped."""
    uninterrupted = told(task_of(kind, WORLD, graphs=True), range(40))
    task, keeper = task_of(kind, WORLD, graphs=True), Checkpointer(tmp_path)
    told(task, range(20))
    keeper.save(20, task.state())
    told(task, range(20, 26))  # while it is being written
    keeper.wait()
    keeper.close()
    _, saved = find_newest_checkpoint(tmp_path)
    task.load(saved)
    new = task_of(kind, WORLD, graphs=True)
    new.load(saved)
    for each in (task, new):
        story = told(each, range(20, 40))
        assert story.chosen == uninterrupted.chosen[20:]
        assert story.values == uninterrupted.values[20:] or kind == "eval_first"  # NaN is unequal to itself
        assert furthest(story, uninterrupted) == 0.0


@pytest.mark.parametrize("graphs", [True, False])
@every_kind
def test_twenty_steps_wait_for_nothing(kind, graphs):
    """Steps 30 to 50 begin epochs, in which MentorNet draws anew, and its last phase."""
    step_without_waiting(task_of(kind, WORLD, graphs=graphs, precision="bf16"), range(30, 51))


def test_a_rehearsal_draws_nothing():
    """What a network draws (dropout) does not depend on how often its step was recorded."""
    torch.manual_seed(0)
    task = task_of("one_pass", WORLD, graphs=True)
    task.step(batch_at(0, task.device), position(0))
    recorded = torch.cuda.get_rng_state()
    torch.manual_seed(0)
    task.step(batch_at(1, task.device), position(1))
    assert torch.equal(torch.cuda.get_rng_state(), recorded)
