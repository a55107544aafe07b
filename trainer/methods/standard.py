"""Cross-entropy on the labels as given: the baseline, and what trains the folds of INCV."""

from collections.abc import Mapping

import torch

from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds
from trainer.methods.optimised import OptimisedModule, sample_losses


class StandardTask(OptimisedModule):
    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        count = self.rows_of_all(batch)
        if not count:  # every image of the step was unreadable
            return {}
        self.begin_step()
        self.module.train()
        loss, agreed = torch.zeros_like(count), torch.zeros_like(count)
        parts = self.parts(len(batch.ids))
        for part in parts:
            labels, weights, last = batch.labels[part], batch.weights[part], part is parts[-1]
            logits = self.forward(batch.images[part], last=last)
            assert isinstance(logits, torch.Tensor)
            share = (sample_losses(logits, labels) * weights).sum() / count
            self.backward(share, last)
            loss = loss + share.detach()
            agreed += ((logits.detach().argmax(1) == labels) * weights).sum()
        loss, agreed = self.world.sum_(torch.stack([loss, agreed.to(loss.dtype)]))
        self.apply(loss, at.step)
        return {"loss": loss, "train_accuracy": agreed / count}
