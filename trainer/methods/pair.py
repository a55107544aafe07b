"""What the Tasks of two networks share: forwards in eval mode, learning from chosen rows alone, and metrics."""

import torch

from trainer.acceleration.cuda_graphs import Inputs
from trainer.acceleration.precision import autocast
from trainer.methods.losses import target_losses
from trainer.methods.targets import look_up
from trainer.methods.task import BaseTask
from trainer.models.frozen import set_train_mode
from trainer.models.twin import TwinModel
from trainer.records.metrics import COUNTED


class PairTask(BaseTask):
    """Trains a TwinModel."""

    module: TwinModel

    def labels_of(self, inputs: Inputs) -> torch.Tensor:
        """Return the given labels of a step's rows: int64 [rows]."""
        return look_up(self.targets, inputs["ids"])

    def eval_logits(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits of both networks for every row, in eval mode: [rows, classes] each."""
        self.module.eval()
        with torch.no_grad(), autocast(self.device, self.precision):
            outputs = [self.module(images[part]) for part in self.parts(len(images))]
        logits_a, logits_b = zip(*outputs, strict=True)
        return torch.cat(logits_a), torch.cat(logits_b)

    def learn_rows(
        self, inputs: Inputs, for_a: torch.Tensor, for_b: torch.Tensor, rows: int, divisor: torch.Tensor | float
    ) -> torch.Tensor:
        """Accumulate gradients of each network's losses on its rows, summed and divided by `divisor`; return the sum
        of both losses and each loss: [3].

        for_a, for_b: indices of the rows that each network learns from, padded with -1: int64 [rows of the batch].
        rows: fixed number of rows of the forward. Fewer rows are repeated up to it with weight 0, so that the padding
        affects only BatchNorm.
        """
        images, labels = inputs["images"], self.labels_of(inputs)
        (for_a, real_a), (for_b, real_b) = (_repeat_rows(each, rows) for each in (for_a, for_b))
        shares = torch.zeros(3, device=self.device)
        set_train_mode(self.module)
        parts = self.parts(rows)
        for part in parts:
            last = part is parts[-1]
            logits_a, logits_b = self.forward(images[for_a[part]], images[for_b[part]], last=last)
            losses_a = target_losses(logits_a, labels[for_a[part]], self.smoothing) * real_a[part]
            losses_b = target_losses(logits_b, labels[for_b[part]], self.smoothing) * real_b[part]
            sum_a, sum_b = losses_a.sum(), losses_b.sum()
            share = (sum_a + sum_b) / divisor
            self.backward(share, last)
            shares = shares + torch.stack([share, sum_a / divisor, sum_b / divisor]).detach()
        return shares


def order_rows(places: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the indices of the rows where `chosen` is true, ordered by `places` and padded with -1: int64 [rows]."""
    order = torch.argsort(torch.where(chosen, places, torch.iinfo(places.dtype).max), stable=True)
    return torch.where(torch.arange(len(order), device=order.device) < chosen.sum(), order, -1)


def _repeat_rows(chosen: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat the chosen rows up to length `rows`; return them and a mask that is 1 for first occurrences, else 0.

    chosen: row indices, padded with -1. A rank without a chosen row returns its first rows, with the mask all 0.
    """
    place = torch.arange(rows, device=chosen.device)
    count = (chosen >= 0).sum()
    shown = torch.where(count > 0, chosen[place % count.clamp(min=1)], place % len(chosen))
    return shown, (place < count).float()


def count_agreeing(
    logits_a: torch.Tensor, logits_b: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Count the real rows whose given label each network predicts: float [2]."""
    agreed = torch.stack([logits_a.argmax(1), logits_b.argmax(1)]) == labels
    return (agreed.float() * weights).sum(dim=1)


def pair_values(losses: torch.Tensor, agreed: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of a step of two networks, each a float [].

    losses: of both networks together, of a and of b, [3]; agreed: rows whose label a and b predict, [2]; rows: the
    real rows, []; all over all ranks.
    """
    counted, shown = rows > 0, rows.clamp(min=1)
    loss, loss_a, loss_b = torch.where(counted, losses, 0.0)
    agreed_a, agreed_b = agreed
    return {
        "loss": loss / 2,
        "loss_a": loss_a,
        "loss_b": loss_b,
        "train_accuracy": (agreed_a + agreed_b) / 2 / shown,
        "train_accuracy_a": agreed_a / shown,
        "train_accuracy_b": agreed_b / shown,
        COUNTED: counted.to(losses.dtype),
    }
