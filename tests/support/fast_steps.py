"""Trainings of a small BatchNorm network where every step differs: rate, n(e), weights, lost rows, NaN."""

import copy
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from trainer.config.optimisation import OptimizerConfig
from trainer.distributed.world import World
from trainer.loading.batch import Batch, BatchMix
from trainer.loading.epoch_plan import Schedule, StepIds
from trainer.methods.built_in import ChooseBy
from trainer.methods.coteaching import CoteachingTask, ForgetSchedule
from trainer.methods.decoupling import DecouplingTask
from trainer.methods.mentornet import MentorNetTask
from trainer.methods.standard import StandardTask
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.factory import create_model
from trainer.models.frozen import freeze_features
from trainer.models.twin import TwinModel

ROWS, CANDIDATES, CLASSES, PER_EPOCH = 32, 16, 10, 5
TOTAL = 100
KINDS = ("standard", "one_pass", "eval_first")
MEASURES = {"decoupling": "disagreement", "decoupling_eval_first": "disagreement", "mentornet": "mean_weight"}
"""The baselines, each with a metric that changes with the steps."""
SAMPLES = 1000 + CANDIDATES
"""The largest sample_id + 1."""
SCHEDULE = Schedule(7, TOTAL // PER_EPOCH, PER_EPOCH, ROWS, np.arange(SAMPLES))
TARGETS = torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(5))
"""The label of each sample."""
OPTIMIZERS = {
    "adam": OptimizerConfig(learning_rate=1e-3, milestones=((4, 3e-4),), warmup_epochs=1, weight_decay=1e-3),
    "adamw": OptimizerConfig(
        kind="adamw", learning_rate=1e-3, schedule="cosine", warmup_epochs=1, weight_decay=0.05, decay_scope="weights"
    ),
    "sgd": OptimizerConfig(kind="sgd", learning_rate=0.05, milestones=((4, 0.01),), weight_decay=1e-3, clip=2.0),
}
EMPTY, POISONED, SHORT = 13, 17, 24
"""Steps in which nothing can be read, a pixel is NaN, the batch is a short last one."""


def task_of(
    kind: str, world: World, optimizer: str = "sgd", classifier_only: bool = False, **form: object
) -> BaseTask:
    """form: of TaskSettings (graphs, compile, precision, micro)."""
    setting = TaskSettings(OPTIMIZERS[optimizer], SCHEDULE, TARGETS, world, **form)
    networks = [create_model("cifar_resnet20", CLASSES, seed) for seed in (1, 2)]
    if classifier_only:
        for network in networks:
            freeze_features(network)
    return build_task(kind, networks[0], networks[1], setting)


def build_task(kind: str, a: nn.Module, b: nn.Module, setting: TaskSettings) -> BaseTask:
    """b: the second network of a pair."""
    if kind == "standard":
        return StandardTask(a, setting)
    if kind.startswith("decoupling"):
        compare: ChooseBy = "eval_first" if kind.endswith("eval_first") else "one_pass"
        return DecouplingTask(TwinModel(a, b), setting, compare)
    if kind == "mentornet":  # half as long: the steps that are tested reach all phases
        setting = replace(setting, schedule=replace(SCHEDULE, epochs=SCHEDULE.epochs // 2))
        return MentorNetTask(a, setting, 0.5, stream=7, samples=SAMPLES)
    rank: ChooseBy = "one_pass" if kind == "one_pass" else "eval_first"
    return CoteachingTask(TwinModel(a, b), setting, ForgetSchedule(ROWS, 0.5, 6), rank)


def position(step: int) -> StepIds:
    """From the fifth epoch on, rows of C too."""
    epoch = step // PER_EPOCH
    selected = ROWS - 9 if step == SHORT else ROWS
    candidates = (CANDIDATES if step != SHORT else CANDIDATES // 2) if epoch >= 5 else 0
    return StepIds(step, epoch, (np.arange(selected), np.arange(1000, 1000 + candidates)))


def batch_at(step: int, device: torch.device, dtype: torch.dtype = torch.float32, mixed: bool = False) -> Batch:
    """mixed: whether the rows are mixed with the next (mixup)."""
    at = position(step)
    shape = ROWS + (CANDIDATES if at.epoch >= 5 else 0)
    real = len(at.selected) + len(at.candidates)
    generator = torch.Generator().manual_seed(step)
    ids = torch.full((shape,), -1)
    ids[:real] = torch.from_numpy(np.concatenate([at.selected, at.candidates]))
    side = 32 if device.type == "cuda" else 8  # enough for shapes, state and order, at a sixteenth of the work
    images = torch.randn(shape, 3, side, side, generator=generator)
    weights = (ids >= 0).float()
    weights[step % real] = 0.0  # an unreadable row
    if step == EMPTY:
        weights.zero_()
    if step == POISONED:
        images[3, 0, 5, 5] = torch.nan
    images = images.to(device, dtype).contiguous(memory_format=torch.channels_last)
    batch = Batch(ids.to(device), images, weights.to(device))
    if mixed:
        partners = torch.arange(shape, device=device).roll(-1)
        batch.mix = BatchMix(partners, torch.rand(shape, generator=generator).to(device))
    return batch


@dataclass
class Story:
    """What was seen of a training, step by step."""

    values: list[dict[str, float]] = field(default_factory=list)
    chosen: list[list[list[int]]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: dict[str, object] = field(default_factory=dict)


def told(task: BaseTask, steps: range, dtype: torch.dtype = torch.float32, mixed: bool = False) -> Story:
    story = Story()
    for step in steps:
        values = task.step(batch_at(step, task.device, dtype, mixed), position(step))
        story.values.append({name: float(value) for name, value in values.items()})
        story.chosen.append([ids.tolist() for ids in task.chosen or ()])
    state = task.state()
    story.state = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    story.counts = copy.deepcopy(state.values)
    return story


def step_without_waiting(task: BaseTask, steps: range) -> None:
    """Make bf16 steps; an error if the host waits for the GPU in any but the first, which may be captured."""
    made = [(batch_at(step, task.device, torch.bfloat16), position(step)) for step in steps]
    task.step(*made[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch, at in made[1:]:
            task.step(batch, at)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def furthest(a: Story, b: Story) -> float:
    """The largest difference of a number of the two final states; they hold the same names."""
    assert a.state.keys() == b.state.keys()
    return max(float((a.state[name].double() - b.state[name].double()).abs().max()) for name in a.state)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]
