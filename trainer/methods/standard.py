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
        count = batch.weights.sum()
        loss, agreed = torch.zeros_like(count), torch.zeros_like(count)
        for part in self.parts(len(batch.ids)):
            labels, weights = batch.labels[part], batch.weights[part]
            with autocast(self.device, self.precision):
                logits = self.module(batch.images[part])
            share = (sample_losses(logits, labels) * weights).sum() / count
            self.backward(share)
            loss += share.detach()
            agreed += ((logits.detach().argmax(1) == labels) * weights).sum()
        self.apply(loss, at.step)
        return {"loss": loss, "train_accuracy": agreed / count}
