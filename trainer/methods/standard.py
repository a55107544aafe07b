"""Cross-entropy on the labels as given: the baseline, and what trains the folds of INCV."""

from collections.abc import Mapping

import torch

from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds
from trainer.methods.optimised import OptimisedModule, autocast, sample_losses


class StandardTask(OptimisedModule):
    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        if not batch.weights.any():  # every image of the step was unreadable
            return {}
        self.begin_step()
        self.module.train()
        with autocast(self.device, self.precision):
            logits = self.module(batch.images)
        count = batch.weights.sum()
        loss = (sample_losses(logits, batch.labels) * batch.weights).sum() / count
        self.update(loss, at.step)
        agreed = (logits.detach().argmax(1) == batch.labels) * batch.weights
        return {"loss": loss.detach(), "train_accuracy": agreed.sum() / count}
