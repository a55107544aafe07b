"""Co-teaching (Algorithm 3): two networks, each trained on the rows its peer finds easy.

Alone it runs on all data; after INCV on S, and from the end of the warm-up on S and C.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from trainer.loading.batch import Batch
from trainer.loading.sample_order import StepIds, deal
from trainer.methods.optimised import OptimisedModule, Setting, autocast, sample_losses
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


@dataclass(frozen=True)
class Forgetting:
    """How many rows of a step are kept."""

    batch: int
    rate: float
    """ε_S of Algorithm 3, τ of Co-teaching alone."""
    ramp_epochs: int

    def kept(self, selected_rows: int, epoch: int) -> int:
        return kept_rows(selected_rows, epoch, self.rate, self.ramp_epochs)


@dataclass(frozen=True)
class Choice:
    """The rows of a step that each network finds easy, chosen among the rows of all ranks."""

    of_a: torch.Tensor
    """int64: this rank's own rows among them, easiest first."""
    of_b: torch.Tensor
    kept: int
    """Rows that each network keeps, over all ranks."""
    poison: torch.Tensor
    """0, or NaN where a real row's loss is not finite: such a batch is no evidence about its labels at all."""


_Learned = tuple[Choice, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
"""What was chosen, this rank's share of both networks' losses, and rows that agreed out of rows."""


class CoteachingTask(OptimisedModule):
    """TwinModel with the exchange; `rank` says which losses choose (DESIGN contract 7)."""

    module: TwinModel

    def __init__(
        self, module: TwinModel, setting: Setting, forgetting: Forgetting, rank: Literal["one_pass", "eval_first"]
    ) -> None:
        """setting.micro: for `eval_first` alone; `one_pass` needs all rows' losses before the first backward."""
        super().__init__(module, setting)
        self._forgetting, self._rank = forgetting, rank

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        self.chosen = None
        if not self.rows_of_all(batch):  # every image of the step was unreadable
            return {}
        self.begin_step()
        # n(e) counts rows of S only, also where rows of C compete for a place.
        keep = self._forgetting.kept(len(at.selected), at.epoch)
        learned = self._one_pass if self._rank == "one_pass" else self._eval_first
        choice, loss, agreed = learned(batch, at, keep)
        loss, agreed, count = self.world.sum_(torch.stack([loss, *(part.to(loss.dtype) for part in agreed)]))
        loss = loss + choice.poison
        self.apply(loss, at.step)
        self.chosen = batch.ids[choice.of_a], batch.ids[choice.of_b]
        return {"loss": loss / 2, "train_accuracy": agreed / count, "kept": torch.tensor(float(choice.kept))}

    def _choose(self, batch: Batch, at: StepIds, keep: int, losses: Sequence[torch.Tensor]) -> Choice:
        """The smallest losses of the global batch, found by every rank alike.

        losses: [rows] of a and of b. They meet in an array over the step's ids, S before C, in which each row is
        written by one rank and is zero on the others: the very array that one process would have.
        """
        world, n_s, n_c = self.world, len(at.selected), len(at.candidates)
        shares = deal(np.arange(n_s), world.rank, world.size), deal(np.arange(n_c), world.rank, world.size)
        places = torch.from_numpy(np.concatenate([shares[0], n_s + shares[1]])).to(self.device)
        own = len(places)
        everywhere = torch.zeros(3, n_s + n_c, dtype=losses[0].dtype, device=self.device)
        everywhere[:, places] = torch.stack([*losses, batch.weights.to(losses[0].dtype)])[:, :own].detach()
        of_a, of_b, weights = world.sum_(everywhere)
        easy = small_loss_rows(of_a, weights, keep), small_loss_rows(of_b, weights, keep)
        row_of = torch.full((n_s + n_c,), -1, dtype=torch.int64, device=self.device)
        row_of[places] = torch.arange(own, device=self.device)
        poison = torch.where(weights > 0, of_a + of_b, 0.0).sum() * 0.0
        mine_a, mine_b = (row_of[rows] for rows in easy)
        return Choice(mine_a[mine_a >= 0], mine_b[mine_b >= 0], len(easy[0]), poison)

    def _one_pass(self, batch: Batch, at: StepIds, keep: int) -> _Learned:
        """Choose by the training forward's own losses."""
        self.module.train()
        logits_a, logits_b = self.forward(batch.images)
        losses_a, losses_b = sample_losses(logits_a, batch.labels), sample_losses(logits_b, batch.labels)
        choice = self._choose(batch, at, keep, (losses_a, losses_b))
        # Algorithm 3, lines 7 and 8: f1 learns what f2 finds easy, and the other way round.
        share = losses_a[choice.of_b].sum() / choice.kept + losses_b[choice.of_a].sum() / choice.kept
        self.backward(share)
        return choice, share.detach(), _agreed(logits_a, logits_b, batch)

    def _eval_first(self, batch: Batch, at: StepIds, keep: int) -> _Learned:
        """Rank in eval mode without gradient, then train each network on its peer's choice alone."""
        logits_a, logits_b = self._ranking_logits(batch)
        ranked = sample_losses(logits_a, batch.labels), sample_losses(logits_b, batch.labels)
        choice = self._choose(batch, at, keep, ranked)
        # The fixed shape of the second forward. The rows chosen of one rank's are anywhere between none and all.
        alone = self._forgetting.kept(self._forgetting.batch, at.epoch)
        rows = alone if self.world.size == 1 else len(batch.ids)
        return choice, self._learn(batch, choice, rows), _agreed(logits_a, logits_b, batch)

    def _ranking_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What both networks say of every row, in eval mode: [rows, classes] each."""
        self.module.eval()
        with torch.no_grad(), autocast(self.device, self.precision):
            said = [self.module(batch.images[part]) for part in self.parts(len(batch.ids))]
        logits_a, logits_b = zip(*said, strict=True)
        return torch.cat(logits_a), torch.cat(logits_b)

    def _learn(self, batch: Batch, choice: Choice, rows: int) -> torch.Tensor:
        """Gradients of each network's mean loss over its chosen rows, part by part; returns the sum of the two.

        rows: a short choice is filled up with its own rows, at weight 0, for BatchNorm's sake alone.
        """
        for_a, for_b = _filled(choice.of_b, rows), _filled(choice.of_a, rows)
        loss = torch.zeros((), device=self.device)
        self.module.train()
        parts = self.parts(rows)
        for part in parts:
            last = part is parts[-1]
            logits_a, logits_b = self.forward(batch.images[for_a[part]], batch.images[for_b[part]], last=last)
            losses_a = sample_losses(logits_a, batch.labels[for_a[part]])[: max(0, len(choice.of_b) - part.start)]
            losses_b = sample_losses(logits_b, batch.labels[for_b[part]])[: max(0, len(choice.of_a) - part.start)]
            share = losses_a.sum() / choice.kept + losses_b.sum() / choice.kept
            self.backward(share, last)
            loss = loss + share.detach()
        return loss


def _filled(chosen: torch.Tensor, rows: int) -> torch.Tensor:
    """The chosen rows, repeated up to `rows`; a rank of whose rows none was chosen shows its first ones."""
    place = torch.arange(rows, device=chosen.device)
    return chosen[place % len(chosen)] if len(chosen) else place


def _agreed(logits_a: torch.Tensor, logits_b: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Real rows whose given label the networks predict, mean over the two, and real rows."""
    agreed = (logits_a.argmax(1) == batch.labels).float() + (logits_b.argmax(1) == batch.labels).float()
    return (agreed * batch.weights).sum() / 2, batch.weights.sum()
