"""Co-teaching (Algorithm 3): two networks, each trained on the rows its peer finds easy.

Alone it runs on all data; after INCV on S, and from the end of the warm-up on S and C.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch

from trainer.config import OptimizerConfig
from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds
from trainer.methods.optimised import OptimisedModule, Precision, autocast, sample_losses
from trainer.models import TwinModel


def kept_rows(selected_rows: int, epoch: int, forget_rate: float, ramp_epochs: int = 10) -> int:
    """n(e) = round(|B_S| (1 - ε_S min(e / 10, 1))), e from 0; at least one row."""
    kept = selected_rows * (1.0 - forget_rate * min(epoch / ramp_epochs, 1.0))
    return max(1, math.floor(kept + 0.5))


def small_loss_rows(losses: torch.Tensor, weights: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` real rows with the smallest losses, easiest first, ties by row: int64 [<= keep].

    losses: float32 [rows]; weights: float32 [rows], 0 in rows that may not be chosen.
    """
    real = int(torch.count_nonzero(weights))
    worst = torch.finfo(losses.dtype).max
    ranked = torch.where(weights > 0, losses.nan_to_num(nan=worst, posinf=worst), torch.inf)
    return torch.argsort(ranked, stable=True)[: min(keep, real)]


class CoteachingTask(OptimisedModule):
    """TwinModel with the exchange; `rank` says which losses choose (DESIGN contract 7)."""

    module: TwinModel

    def __init__(
        self,
        module: TwinModel,
        optimizer: OptimizerConfig,
        steps_per_epoch: int,
        device: torch.device,
        precision: Precision,
        batch: int,
        forget_rate: float,
        ramp_epochs: int,
        rank: Literal["one_pass", "eval_first"],
        micro: int | None = None,
    ) -> None:
        """micro: for `eval_first` alone; `one_pass` needs the losses of all rows before the first backward."""
        super().__init__(module, optimizer, steps_per_epoch, device, precision, micro)
        self._batch, self._rank = batch, rank
        self._forget_rate, self._ramp_epochs = forget_rate, ramp_epochs

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        if not batch.weights.any():  # every image of the step was unreadable
            return {}
        self.begin_step()
        # n(e) counts rows of S only, also where rows of C compete for a place.
        keep = kept_rows(len(at.selected), at.epoch, self._forget_rate, self._ramp_epochs)
        if self._rank == "one_pass":
            loss, agreed, kept = self._one_pass(batch, keep)
        else:
            rows = kept_rows(self._batch, at.epoch, self._forget_rate, self._ramp_epochs)
            loss, agreed, kept = self._eval_first(batch, keep, rows)
        self.apply(loss, at.step)
        return {"loss": loss / 2, "train_accuracy": agreed, "kept": torch.tensor(float(kept))}

    def _one_pass(self, batch: Batch, keep: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Choose by the training forward's own losses. Gives loss of both networks, agreement, rows kept."""
        self.module.train()
        with autocast(self.device, self.precision):
            logits_a, logits_b = self.module(batch.images)
        losses_a, losses_b = sample_losses(logits_a, batch.labels), sample_losses(logits_b, batch.labels)
        easy_for_a = small_loss_rows(losses_a.detach(), batch.weights, keep)
        easy_for_b = small_loss_rows(losses_b.detach(), batch.weights, keep)
        # Algorithm 3, lines 7 and 8: f1 learns what f2 finds easy, and the other way round.
        loss = losses_a[easy_for_b].mean() + losses_b[easy_for_a].mean()
        self.backward(loss)
        loss = loss.detach() + _zero_if_finite(losses_a, batch) + _zero_if_finite(losses_b, batch)
        return loss, _agreement(logits_a, logits_b, batch), len(easy_for_a)

    def _eval_first(self, batch: Batch, keep: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Rank in eval mode without gradient, then train each network on its peer's choice alone.

        rows: the fixed shape of that second forward; a short choice is filled up with its own rows, weight 0.
        """
        logits_a, logits_b = self._ranking_logits(batch)
        ranked_a, ranked_b = sample_losses(logits_a, batch.labels), sample_losses(logits_b, batch.labels)
        easy_for_a = small_loss_rows(ranked_a, batch.weights, keep)
        easy_for_b = small_loss_rows(ranked_b, batch.weights, keep)
        loss = self._learn(batch, easy_for_b, easy_for_a, rows)
        loss = loss + _zero_if_finite(ranked_a, batch) + _zero_if_finite(ranked_b, batch)
        return loss, _agreement(logits_a, logits_b, batch), len(easy_for_a)

    def _ranking_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What both networks say of every row, in eval mode: [rows, classes] each."""
        self.module.eval()
        with torch.no_grad(), autocast(self.device, self.precision):
            said = [self.module(batch.images[part]) for part in self.parts(len(batch.ids))]
        logits_a, logits_b = zip(*said, strict=True)
        return torch.cat(logits_a), torch.cat(logits_b)

    def _learn(self, batch: Batch, chosen_a: torch.Tensor, chosen_b: torch.Tensor, rows: int) -> torch.Tensor:
        """Gradients of each network's mean loss over its chosen rows, part by part; returns the sum of the two.

        chosen_a, chosen_b: int64 [kept], batch rows for either network.
        """
        kept = len(chosen_a)
        place = torch.arange(rows, device=self.device) % kept
        for_a, for_b = chosen_a[place], chosen_b[place]
        loss = torch.zeros((), device=self.device)
        self.module.train()
        for part in self.parts(rows):
            counted = max(0, kept - part.start)  # rows beyond the choice repeat it, for BatchNorm's sake alone
            with autocast(self.device, self.precision):
                logits_a, logits_b = self.module(batch.images[for_a[part]], batch.images[for_b[part]])
            losses_a = sample_losses(logits_a, batch.labels[for_a[part]])[:counted]
            losses_b = sample_losses(logits_b, batch.labels[for_b[part]])[:counted]
            share = losses_a.sum() / kept + losses_b.sum() / kept
            self.backward(share)
            loss += share.detach()
        return loss


def _zero_if_finite(ranked: torch.Tensor, batch: Batch) -> torch.Tensor:
    """0, or NaN where a real row's loss is not finite: such a batch is no evidence about its labels at all."""
    return torch.where(batch.weights > 0, ranked.detach(), 0.0).sum() * 0.0


def _agreement(logits_a: torch.Tensor, logits_b: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Share of real rows whose given label the networks predict, mean over the two."""
    agreed = (logits_a.argmax(1) == batch.labels).float() + (logits_b.argmax(1) == batch.labels).float()
    return (agreed * batch.weights).sum() / (2 * batch.weights.sum().clamp(min=1))
