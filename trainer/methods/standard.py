"""Training on the given labels: the baseline method, also used to train INCV's folds."""

import torch
from torch import nn

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram, SyncPoint
from trainer.methods.losses import generalised_losses, target_losses
from trainer.methods.method import Method, MethodInputs, MethodTraining
from trainer.methods.sections import StandardConfig
from trainer.methods.targets import agreement, look_up, mix_images, mix_targets
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.frozen import set_train_mode
from trainer.records.metrics import COUNTED


class StandardTask(BaseTask):
    """Learns from the given labels, with the cross-entropy or the generalised cross-entropy."""

    def __init__(self, module: nn.Module, setting: TaskSettings) -> None:
        super().__init__(module, setting)
        self._gce_q = setting.gce_q

    def row_losses(self, logits: torch.Tensor, targets: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Return the loss of each row of a micro-batch, which other methods replace by their own: [rows].

        targets: labels, int64 [rows], or probabilities, float [rows, classes]; inputs: of the whole step.
        """
        if self._gce_q is not None:
            return generalised_losses(logits, targets, self._gce_q, self.smoothing)
        return target_losses(logits, targets, self.smoothing)

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
    return MethodTraining(StandardTask(inputs.module(), inputs.settings(plan)))


METHOD = Method("standard", "Standard training", StandardConfig, build, supports_mixup=True, is_reference=True)
