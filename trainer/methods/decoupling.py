"""Decoupling (Malach and Shalev-Shwartz 2017): two networks that learn only where their predictions differ.

Each step shows both networks the same rows. Each of them learns from its own loss on the rows whose predicted classes
differ, both predictions being those of the training forward. The sum of these losses is divided by the number of such
rows, but at least by a tenth of the batch, as in the authors' code: when the networks nearly agree, the few rows left
must not get the weight of a whole batch. There are no epochs on all rows first (the authors' default).
"""

import torch

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram
from trainer.methods.losses import target_losses
from trainer.methods.method import Method, MethodInputs, MethodTraining
from trainer.methods.sections import DecouplingConfig
from trainer.methods.targets import agreement
from trainer.methods.task import BaseTask
from trainer.models.frozen import set_train_mode
from trainer.models.twin import TwinModel
from trainer.records.metrics import COUNTED

MIN_SHARE = 0.1
"""The losses are divided by at least this share of the batch (`min_batch_size` in the authors' code)."""


def find_disagreements(logits_a: torch.Tensor, logits_b: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return 1 for the real rows whose predicted classes differ, else 0: [rows], in the type of `weights`.

    logits_a, logits_b: [rows, classes]; weights: [rows], 0 for fill rows and unreadable rows.
    """
    return (logits_a.argmax(1) != logits_b.argmax(1)).to(weights.dtype) * weights


def divisor_of(disagreements: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return max(0.1 B, D), by which the sum of the losses is divided: []; positive even if there are no rows.

    disagreements: D, [], the rows whose predictions differ, over all ranks; rows: B, [], the real rows.
    """
    return torch.maximum(disagreements, MIN_SHARE * rows.clamp(min=1))


class DecouplingTask(BaseTask):
    """Trains a TwinModel: each network learns from its own loss on the rows whose predictions differ."""

    module: TwinModel

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        self.begin_step()
        set_train_mode(self.module)
        every = inputs["weights"]
        zero = every.new_zeros(())
        loss, differ = zero, zero
        losses, agreed = every.new_zeros(2), every.new_zeros(2)  # of network a and network b
        # The divisor is known after the last micro-batch of the last rank only, so the gradients are those of the
        # losses divided by a constant, and are scaled to the divisor in the end.
        constant = float(self.world.size * len(every))
        parts = self.parts(len(every))
        for part in parts:
            labels, weights, last = inputs["labels"][part], every[part], part is parts[-1]
            logits_a, logits_b = self.forward(inputs["images"][part], last=last)
            learnt = find_disagreements(logits_a, logits_b, weights)
            losses_a, losses_b = (target_losses(logits, labels, self.smoothing) for logits in (logits_a, logits_b))
            # Multiplied, not selected: a loss that is not finite must end in NaN, which `update` recognises.
            share = ((losses_a + losses_b) * learnt).sum() / constant
            self.backward(share, last)
            loss, differ = loss + share.detach(), differ + learnt.sum()
            losses = losses + (torch.stack([losses_a, losses_b]).detach() * learnt).sum(dim=1) / constant
            right = torch.stack([agreement(logits.detach(), labels) for logits in (logits_a, logits_b)])
            agreed = agreed + (right * weights).sum(dim=1)
        totals = yield from self.reduce_gradients(loss, differ, every.sum(), *losses, *agreed)
        loss, differ, rows, loss_a, loss_b, agreed_a, agreed_b = totals
        factor = constant / divisor_of(differ, rows)
        self.scale_gradients(factor)
        loss, counted, shown = loss * factor, rows > 0, rows.clamp(min=1)
        self.update(loss, counted)
        return {
            "loss": torch.where(counted, loss / 2, 0.0),
            "loss_a": torch.where(counted, loss_a * factor, 0.0),
            "loss_b": torch.where(counted, loss_b * factor, 0.0),
            "train_accuracy": (agreed_a + agreed_b) / 2 / shown,
            "train_accuracy_a": agreed_a / shown,
            "train_accuracy_b": agreed_b / shown,
            "disagreement": differ / shown,
            COUNTED: counted.to(loss.dtype),
        }


def _build(inputs: MethodInputs) -> MethodTraining:
    module = inputs.module()
    assert isinstance(module, TwinModel)
    plan = inputs.plan(inputs.samples)
    return MethodTraining(DecouplingTask(module, inputs.settings(plan)), plan)


METHOD = Method("decoupling", "Decoupling", DecouplingConfig, _build, networks=2)
