"""Networks small enough to check by hand, and batches of numbers for them."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config.optimisation import OptimizerConfig
from trainer.config.section import Precision
from trainer.distributed.world import SINGLE_PROCESS
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import Schedule, StepIds
from trainer.methods.task import TaskSettings

CPU = torch.device("cpu")
RATE = 0.1
SGD = OptimizerConfig(kind="sgd", momentum=0.0, learning_rate=RATE)
CLASSES = 4
TARGETS = torch.randint(CLASSES, (2000,), generator=torch.Generator().manual_seed(5))
"""The label of each sample."""


@dataclass
class LabelledBatch(Batch):
    """A batch of a test that knows the labels of its rows."""

    targets: torch.Tensor = field(default_factory=lambda: TARGETS)
    """By sample_id."""

    @property
    def labels(self) -> torch.Tensor:
        return self.targets[self.ids.clamp(min=0)]


def schedule_of(steps_per_epoch: int, epochs: int = 20) -> Schedule:
    return Schedule(7, epochs, steps_per_epoch, 8, np.arange(len(TARGETS)))


def setting(
    optimizer: OptimizerConfig = SGD,
    precision: Precision = "fp32",
    micro: int | None = None,
    steps_per_epoch: int = 5,
    epochs: int = 20,
    targets: torch.Tensor = TARGETS,
    **form: Any,
) -> TaskSettings:
    """One process on the CPU. form: other fields of TaskSettings."""
    schedule = schedule_of(steps_per_epoch, epochs)
    return TaskSettings(optimizer, schedule, targets, SINGLE_PROCESS, precision=precision, micro=micro, **form)


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES))


def normed(seed: int) -> nn.Module:
    """With BatchNorm, away from its initial statistics so that train and eval mode differ."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, CLASSES))
    network[1].running_mean.normal_()
    network[1].running_var.uniform_(0.5, 2.0)
    return network


def batch_of(rows: int, real: int | None = None, seed: int = 0) -> LabelledBatch:
    generator = torch.Generator().manual_seed(seed)
    real = rows if real is None else real
    return LabelledBatch(
        ids=torch.where(torch.arange(rows) < real, torch.arange(rows), -1),
        images=torch.randn(rows, 3, 2, 2, generator=generator),
        weights=(torch.arange(rows) < real).float(),
    )


def step_at(selected: int, candidates: int = 0, epoch: int = 0, step: int = 0) -> StepIds:
    return StepIds(step, epoch, (np.arange(selected), np.arange(1000, 1000 + candidates)))


def losses_of(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log softmax at the label, written out: [rows]."""
    logits = network(images)
    return logits.logsumexp(1) - logits[torch.arange(len(labels)), labels]


def easiest(losses: torch.Tensor, keep: int, among: range | None = None) -> list[int]:
    values = losses.tolist()
    return sorted(among or range(len(values)), key=lambda row: (values[row], row))[:keep]


def after_one_step(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """A copy of the network after one step of SGD on the mean loss of these rows, in train mode."""
    trained = copy.deepcopy(network).train()
    losses_of(trained, images, labels).mean().backward()
    descend(trained)
    return trained


def descend(network: nn.Module) -> None:
    """Take a step of SGD along the network's gradients, written out."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= RATE * parameter.grad


def assert_same_network(network: nn.Module, expected: nn.Module, atol: float = 1e-6) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(
            network.state_dict()[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
