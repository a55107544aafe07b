"""A training method in its own package: two independent networks on INCV's selection, with label smoothing."""

import torch
import torch.nn.functional as F

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram, SyncPoint
from trainer.config.schema import TrainingConfig
from trainer.config.section import Ratio
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.method import Method
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.twin import TwinModel
from trainer.records.metrics import COUNTED


class ToyConfig(TrainingConfig):
    smoothing: Ratio = 0.1


class ToyTask(BaseTask):
    module: TwinModel

    def __init__(self, module: TwinModel, settings: TaskSettings, smoothing: float) -> None:
        super().__init__(module, settings)
        self._smoothing = smoothing

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        count = inputs["weights"].sum()
        yield SyncPoint((count,))
        self.begin_step()
        self.module.train()
        losses = [
            F.cross_entropy(logits, inputs["labels"], reduction="none", label_smoothing=self._smoothing)
            for logits in self.forward(inputs["images"])
        ]
        share = sum((loss * inputs["weights"]).sum() for loss in losses) / count.clamp(min=1)
        self.backward(share)
        (total,) = yield from self.reduce_gradients(share.detach())
        counted = count > 0
        self.update(total, counted)
        return {"loss": torch.where(counted, total / 2, 0.0), COUNTED: counted.to(total.dtype)}


def build(inputs: MethodInputs) -> MethodTraining:
    plan = inputs.plan(inputs.incv.selected)
    task = ToyTask(inputs.module(), inputs.settings(plan), inputs.config.smoothing)
    return MethodTraining(task, {"smoothing": inputs.config.smoothing})


METHOD = Method(
    "toy_pair",
    "Toy pair",
    ToyConfig,
    "incv_toy:build",
    networks=2,
    inputs=("selection",),
)
