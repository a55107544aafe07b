"""The Tasks of F-correction and D2L, on the steps of `fast_steps`, with a turning point in the middle."""

import numpy as np
import torch
from torch import nn

from tests.support.fast_steps import CLASSES, OPTIMIZERS, PER_EPOCH, SCHEDULE, TARGETS, Story, told
from trainer.distributed.world import World
from trainer.methods.d2l import D2lTask, TurningRule
from trainer.methods.forward_correction import ForwardCorrectionTask
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.methods.transition import normalise_rows
from trainer.models.factory import create_model

KINDS = ("forward_correction", "d2l")
LIDS = (5.0, 4.0, 4.2, 4.1, 9.0, 6.0, 7.0, 6.0, 5.0, 6.0)
"""With a window of 2, the training turns after the fifth epoch."""


def task_of(kind: str, world: World, optimizer: str = "sgd", **form: object) -> StandardTask:
    """form: of TaskSettings (graphs, compile, precision, micro)."""
    setting = TaskSettings(OPTIMIZERS[optimizer], SCHEDULE, TARGETS, world, **form)
    network = create_model("cifar_resnet20", CLASSES, 1) if world.device.type == "cuda" else _small_network()
    if kind == "forward_correction":
        matrix = normalise_rows(np.random.default_rng(0).random((CLASSES, CLASSES)) + 4 * np.eye(CLASSES))
        matrix[3] = np.eye(CLASSES)[3]  # with zeros
        return ForwardCorrectionTask(network, setting, matrix)
    return D2lTask(network, setting, TurningRule(len(LIDS), 0, 2), lambda features, epoch: LIDS[epoch])


def _small_network() -> nn.Module:
    """With BatchNorm, as the one for GPUs, but fast on a CPU."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES))


def told_by_epochs(task: StandardTask, epochs: range, dtype: torch.dtype = torch.float32) -> Story:
    """Steps and ends of epochs, as the training loop makes them."""
    story = Story()
    for epoch in epochs:
        part = told(task, range(epoch * PER_EPOCH, (epoch + 1) * PER_EPOCH), dtype)
        for work in task.after_epoch(epoch):
            work()
        story.values += part.values
    state = task.state()
    story.state = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
    story.counts = dict(state.values)
    return story
