"""The trainer's steps for the benchmarks: tasks built as in a run, fed with batches on the device."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from shards.sample_index import SampleIndex
from trainer.config.optimisation import OptimizerConfig
from trainer.config.schema import ExecutionConfig, ImageConfig
from trainer.distributed.devices import count_visible_gpus, prepare_gpu
from trainer.distributed.stop import StopRequest
from trainer.distributed.world import World
from trainer.loading.augment import Draws
from trainer.loading.batch import Batch, BatchRequest
from trainer.loading.epoch_plan import StaticPlan, StepIds
from trainer.loading.image_set import ImageSet, open_image_set
from trainer.methods.task import TaskSettings
from trainer.models.factory import create_model
from trainer.records.heartbeat import Heartbeat
from trainer.records.manifest import StartLog
from trainer.records.run_directory import RunDirectory
from trainer.training.loop import RunContext

STEPS_PER_EPOCH = 1000
EPOCHS = 100
_MOST_IDS = 2**20
FIRST_EPOCH = 10
"""n(e) has its final value from here on, and the learning rate no longer warms up."""
_RESIDENT = 4  # batches in turn: a step that kept its input from the last call would be found out


class Task(Protocol):
    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Bench:
    """What is trained, and where."""

    device: torch.device
    network: str
    reference_network: str
    classes: int
    pixels: int
    fast: bool = True
    """Compiled and captured; not where the scripts are only tried."""

    @property
    def said(self) -> str:
        return f"{self.network}, {self.classes} classes, {self.pixels} px, bf16"

    def model(self, seed: int) -> torch.nn.Module:
        return create_model(self.network, self.classes, seed)


def device() -> torch.device:
    """The GPU, set up as a run sets it up."""
    if count_visible_gpus() == 0:
        return torch.device("cpu")
    found = torch.device("cuda", 0)
    prepare_gpu(found)
    return found


def webvision_bench(small: bool) -> Bench:
    """The paper's network for WebVision, or what lets the scripts be tried on a CPU in seconds."""
    if small:
        return Bench(device(), "digits_cnn", "cifar_resnet8", 10, 32, fast=False)
    return Bench(device(), "inception_resnet_v2", "inception_resnet_v2", 50, 227)


def cifar_bench(small: bool) -> Bench:
    if small:
        return Bench(device(), "digits_cnn", "cifar_resnet8", 10, 32, fast=False)
    return Bench(device(), "cifar_resnet32", "cifar_resnet32", 10, 32)


SGD = OptimizerConfig(kind="sgd", learning_rate=0.01, momentum=0.9, weight_decay=1e-4)
ADAM = OptimizerConfig(kind="adam", learning_rate=1e-3)


def setting(
    bench: Bench, optimizer: OptimizerConfig, plan: StaticPlan | None = None, labels: torch.Tensor | None = None
) -> TaskSettings:
    """plan, labels: of real images; by default, those of `resident_batches`."""
    world = World(0, 1, bench.device, torch.get_num_threads())
    if plan is None or labels is None:
        plan = StaticPlan(0, np.arange(STEPS_PER_EPOCH), 1, EPOCHS)
        labels = made_up_labels(bench)
    return TaskSettings(
        optimizer,
        plan.schedule,
        labels,
        world,
        plan.plan_epoch,
        "bf16",
        exact=False,
        graphs=bench.fast,
        compile=bench.fast,
    )


def image_set(bench: Bench, index: SampleIndex, image: ImageConfig, execution: ExecutionConfig) -> ImageSet:
    """All usable samples, with their own labels, in bf16."""
    labels = index.label.astype(np.int64)
    return open_image_set(index, index.usable_ids(), labels, image, execution, bench.device, torch.bfloat16)


def surroundings(root: Path, world: World, execution: ExecutionConfig | None = None) -> RunContext:
    """Of the trainer's own loop, in a new run directory."""
    root.mkdir(parents=True)
    heartbeat = Heartbeat(root / "heartbeat.json", 0, 1, "alone")
    notes = StartLog(RunDirectory(root), 0)
    return RunContext(world, execution or ExecutionConfig(), notes, StopRequest(root), heartbeat)


def resident_batches(bench: Bench, rows: int, count: int = _RESIDENT) -> list[Batch]:
    """Batches as a loader hands them over: images in bf16, channels last, on the device."""
    random = torch.Generator().manual_seed(0)
    batches = []
    for number in range(count):
        images = torch.randn(rows, 3, bench.pixels, bench.pixels, generator=random)
        ids = np.arange(number * rows, (number + 1) * rows)
        batches.append(
            Batch(
                ids=torch.from_numpy(ids).to(bench.device),
                images=images.to(bench.device, torch.bfloat16, memory_format=torch.channels_last),
                weights=torch.ones(rows, device=bench.device),
                request=BatchRequest(
                    ids=ids,
                    draws=Draws(
                        np.tile(np.array([0, 0, bench.pixels, bench.pixels], np.int32), (rows, 1)),
                        np.zeros(rows, bool),
                    ),
                    rows=rows,
                    fill_with_images=True,
                ),
            )
        )
    return batches


def made_up_labels(bench: Bench) -> torch.Tensor:
    """Of the ids of `resident_batches`: int64 [ids]."""
    return torch.randint(bench.classes, (_MOST_IDS,), generator=torch.Generator().manual_seed(0))


def labelled(bench: Bench, batches: Sequence[Batch]) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Yield `resident_batches` with the labels of their rows, again and again."""
    labels = made_up_labels(bench).to(bench.device)
    return itertools.cycle([(batch, labels[batch.ids]) for batch in batches])


class Repeated:
    """A task's step on resident batches, again and again; the step's number grows as in a training."""

    def __init__(self, task: Task, batches: Sequence[Batch], candidates: int = 0) -> None:
        """candidates: how many of a batch's rows are of C; they come last."""
        self._task = task
        self._turns = itertools.cycle([(batch, *_split(batch, candidates)) for batch in batches])
        self._numbers = itertools.count(FIRST_EPOCH * STEPS_PER_EPOCH)

    def __call__(self) -> None:
        batch, selected, candidates = next(self._turns)
        step = next(self._numbers)
        self._task.step(batch, StepIds(step, step // STEPS_PER_EPOCH, (selected, candidates)))


def _split(batch: Batch, candidates: int) -> tuple[np.ndarray, np.ndarray]:
    ids = batch.ids.cpu().numpy()
    return ids[: len(ids) - candidates], ids[len(ids) - candidates :]
