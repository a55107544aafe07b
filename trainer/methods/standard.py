"""Training on the given labels: the baseline method, also used to train INCV's folds."""

from functools import partial

import numpy as np
import torch
from torch import nn

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram, SyncPoint
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import RowLosses, build_row_losses, target_losses
from trainer.methods.targets import agreement, look_up, mix_images, mix_targets
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.frozen import set_train_mode
from trainer.records.metrics import COUNTED


class StandardTask(BaseTask):
    """Learns from the given labels."""

    def __init__(self, module: nn.Module, setting: TaskSettings, losses: RowLosses | None = None) -> None:
        """losses: of each row; None: the cross-entropy."""
        super().__init__(module, setting)
        self._losses = losses or partial(target_losses, smoothing=self.smoothing)

    def row_losses(self, logits: torch.Tensor, targets: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the loss of each row of a micro-batch, which other methods replace by their own: [rows].

        targets: labels, int64 [rows], or probabilities, float [rows, classes]; inputs: of the whole step.
        """
        return self._losses(logits, targets)

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        count = inputs["weights"].sum()
        yield SyncPoint((count,))
        rows = count.clamp(min=1)
        self.begin_step()
        set_train_mode(self.module)
        loss, agreed = torch.zeros_like(count), torch.zeros_like(count)
        images, known = mix_images(inputs), look_up(self.targets, inputs["ids"])
        parts = self.parts(len(inputs["weights"]))
        for part in parts:
            weights, last = inputs["weights"][part], part is parts[-1]
            logits = self.forward(images[part], last=last)
            assert isinstance(logits, torch.Tensor)
            targets = mix_targets(inputs, known, part, logits.shape[1])
            share = (self.row_losses(logits, targets, inputs) * weights).sum() / rows
            agreed += (agreement(logits.detach(), targets) * weights).sum()
            self.backward(share, last)
            loss = loss + share.detach()
        loss, agreed = yield from self.reduce_gradients(loss, agreed)
        counted = count > 0
        self.update(loss, counted)
        return {
            "loss": torch.where(counted, loss, 0.0),
            "train_accuracy": agreed / rows,
            COUNTED: counted.to(loss.dtype),
        }


def build(inputs: MethodInputs) -> MethodTraining:
    plan = inputs.plan(inputs.samples)
    task = StandardTask(inputs.module(), inputs.settings(plan), build_row_losses(inputs.config))
    return MethodTraining(task)


def build_on_selection(inputs: MethodInputs) -> MethodTraining:
    """Train on INCV's selected samples, alone or with the candidates: what INCV gives without Co-teaching."""
    selected, candidates = inputs.incv.selected, inputs.incv.candidates
    match inputs.config.candidates:
        case "none":
            plan = inputs.plan(selected)
        case "limited":
            plan = inputs.plan(selected, candidates)
        case _:
            plan = inputs.plan(np.union1d(selected, candidates))
    dealt = 0 if inputs.config.candidates == "none" else len(candidates)
    sizes = {"selected": len(selected), "candidates": dealt}
    task = StandardTask(inputs.module(), inputs.settings(plan), build_row_losses(inputs.config))
    return MethodTraining(task, sizes)
