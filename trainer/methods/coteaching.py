"""Co-teaching (Han et al. 2018): two networks, each trained on the small-loss rows of its peer.

`coteaching` runs on all samples, `coteaching_incv` on INCV's selection (Algorithm 3).
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch

from trainer import theory
from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram, SyncPoint
from trainer.config.schema import IncvConfig
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StaticPlan, StepIds
from trainer.loading.sample_order import slice_for_rank
from trainer.loading.transfer import copy_to_device
from trainer.methods.built_in import ChooseBy, CoteachingConfig, CoteachingIncvConfig, warmup_epochs
from trainer.methods.inputs import MethodInputs, MethodTraining, NoiseFacts
from trainer.methods.losses import target_losses
from trainer.methods.pair import PairTask, count_agreeing, order_rows, pair_values
from trainer.methods.task import TaskSettings
from trainer.models.frozen import set_train_mode
from trainer.models.twin import TwinModel


def rows_to_keep(selected_rows: int, epoch: int, forget_rate: float, ramp_epochs: int = 10) -> int:
    """Number of small-loss rows kept in epoch e: n(e) = round(|B_S| (1 - ε_S min(e / ramp_epochs, 1))), at least 1.

    e counts from 0; |B_S| is `selected_rows` and ε_S is `forget_rate`.
    """
    kept = selected_rows * (1.0 - forget_rate * min(epoch / ramp_epochs, 1.0))
    return max(1, math.floor(kept + 0.5))


def loss_ranks(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rank the rows by loss: int64 [rows], 0 for the smallest loss. Ties are broken by row number.

    losses: float32 [rows]; weights: float32 [rows], 0 for rows that must not be chosen, which rank last.
    """
    worst = torch.finfo(losses.dtype).max
    ranked = torch.where(weights > 0, losses.nan_to_num(nan=worst, posinf=worst), torch.inf)
    order = torch.argsort(ranked, stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


@dataclass(frozen=True)
class ForgetSchedule:
    """The schedule n(e): how many rows each network keeps in a step of epoch e."""

    batch: int
    rate: float
    """Final share of dropped rows: ε_S in Algorithm 3, τ in plain Co-teaching."""
    ramp_epochs: int

    def kept(self, selected_rows: int, epoch: int) -> int:
        return rows_to_keep(selected_rows, epoch, self.rate, self.ramp_epochs)


@dataclass(frozen=True)
class Choice:
    """The small-loss rows that each network chose from the global batch in one step."""

    of_a: torch.Tensor
    """float [rows]: 1 for those of this rank's rows that network a chose, else 0."""
    of_b: torch.Tensor
    rows_a: torch.Tensor
    """int64 [rows]: indices of this rank's rows that network a chose, smallest loss first, padded with -1."""
    rows_b: torch.Tensor
    kept: torch.Tensor
    """[]: number of rows each network keeps, over all ranks."""
    real: torch.Tensor
    """[]: number of rows with non-zero weight, over all ranks."""
    poison: torch.Tensor
    """[]: added to the loss. 0, or NaN if any real row's loss is not finite, which makes `update` skip the step."""


_Learned = Generator[SyncPoint, None, tuple[Choice, torch.Tensor, torch.Tensor]]
"""A generator that returns the choice and, of this rank: its share of the loss of both networks together, of network
a and of network b, [3]; and how many of its rows' labels network a and network b predict, [2]."""


class CoteachingTask(PairTask):
    """Trains a TwinModel: each network learns from the rows on which its peer has a small loss."""

    def __init__(
        self,
        module: TwinModel,
        setting: TaskSettings,
        forget_schedule: ForgetSchedule,
        rank: ChooseBy,
    ) -> None:
        """rank: which losses select the rows. setting.micro applies to `eval_first` only, because `one_pass` needs
        the losses of all rows before the first backward."""
        super().__init__(module, setting)
        self._forget_schedule, self._rank = forget_schedule, rank
        self._places: dict[tuple[int, int, int], torch.Tensor] = {}
        self._keep: dict[int, torch.Tensor] = {}

    def inputs(self, batch: Batch, at: StepIds) -> tuple[Inputs, StaticSizes]:
        inputs, _ = super().inputs(batch, at)
        # n(e) depends on the number of rows of S only, even if the kept rows may also come from C.
        keep = self._forget_schedule.kept(len(at.selected), at.epoch)
        places = self._places_of(len(at.selected), len(at.candidates), len(batch.ids))
        if keep not in self._keep:
            self._keep[keep] = torch.full((), keep, device=self.device)
        inputs = {**inputs, "places": places, "keep": self._keep[keep]}
        if self._rank == "one_pass":
            return inputs, ()
        # Fixed number of rows of the second forward. With several ranks, any number of a rank's rows may be chosen.
        alone = self._forget_schedule.kept(self._forget_schedule.batch, at.epoch)
        return inputs, (alone if self.world.size == 1 else len(batch.ids),)

    def has_transient_shape(self, at: StepIds) -> bool:
        """Whether the step's shape lasts for one epoch only: with eval_first on one rank, while n(e) decreases."""
        forget_schedule = self._forget_schedule
        rows, last = (
            forget_schedule.kept(forget_schedule.batch, epoch) for epoch in (at.epoch, forget_schedule.ramp_epochs)
        )
        return self._rank == "eval_first" and self.world.size == 1 and rows != last

    def _places_of(self, selected: int, candidates: int, rows: int) -> torch.Tensor:
        """Positions of this rank's rows in the global array of the step (S, then C, then fill rows): int64 [rows]."""
        key = selected, candidates, rows
        if key not in self._places:
            world = self.world
            of_s = slice_for_rank(np.arange(selected), world.rank, world.size)
            of_c = slice_for_rank(np.arange(selected, selected + candidates), world.rank, world.size)
            own = np.concatenate([of_s, of_c])
            fill = world.size * rows + np.arange(len(own), rows)
            self._places[key] = copy_to_device(self.device, np.concatenate([own, fill]))[0]
        return self._places[key]

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        self.begin_step()
        learned = self._one_pass(inputs) if self._rank == "one_pass" else self._eval_first(inputs, *fixed)
        choice, shares, agreed = yield from learned
        totals = yield from self.reduce_gradients(*shares, *agreed)
        losses, agreed = totals[:3] + choice.poison, totals[3:]
        self.update(losses[0], choice.real > 0)
        return pair_values(losses, agreed, choice.real) | {
            "kept": choice.kept.to(losses.dtype),
            "chosen_a": choice.rows_a,
            "chosen_b": choice.rows_b,
        }

    def _choose(
        self, inputs: Inputs, losses_a: torch.Tensor, losses_b: torch.Tensor
    ) -> Generator[SyncPoint, None, Choice]:
        """Select the small-loss rows of the global batch; the selection is the same on every rank.

        losses_a, losses_b: this rank's losses, [rows]. They are all-reduced in an array over all ids of the step, S
        before C. Each entry is non-zero on one rank only, so the sum is bitwise equal to a single process's array.
        """
        places, rows = inputs["places"], len(inputs["places"])
        stacked = torch.stack([losses_a, losses_b, inputs["weights"].to(losses_a.dtype)]).detach()
        everywhere = torch.zeros(3, (self.world.size + 1) * rows, dtype=stacked.dtype, device=self.device)
        everywhere.index_copy_(1, places, stacked)
        yield SyncPoint((everywhere,))
        of_a, of_b, weights = everywhere[:, : self.world.size * rows]  # without the fill rows
        real = torch.count_nonzero(weights)
        kept = torch.minimum(inputs["keep"], real)
        poison = torch.where(weights > 0, of_a + of_b, 0.0).sum() * 0.0
        behind = torch.full((rows,), len(weights), device=self.device)
        own_a, own_b = (torch.cat([loss_ranks(each, weights), behind])[places] for each in (of_a, of_b))
        easy_a, easy_b = own_a < kept, own_b < kept
        dtype = losses_a.dtype
        return Choice(
            easy_a.to(dtype),
            easy_b.to(dtype),
            order_rows(own_a, easy_a),
            order_rows(own_b, easy_b),
            kept,
            real,
            poison,
        )

    def _one_pass(self, inputs: Inputs) -> _Learned:
        """Run a step with `rank: one_pass`: select rows by the losses of the training forward."""
        set_train_mode(self.module)
        logits_a, logits_b = self.forward(inputs["images"])
        labels = self.labels_of(inputs)
        losses_a, losses_b = (target_losses(logits, labels) for logits in (logits_a, logits_b))
        choice = yield from self._choose(inputs, losses_a, losses_b)
        if self.smoothing:  # the ranking has no smoothing: it compares how well the given labels are explained
            smoothed = (target_losses(logits, labels, self.smoothing) for logits in (logits_a, logits_b))
            losses_a, losses_b = smoothed
        # Algorithm 3, lines 7 and 8: f1 trains on the small-loss rows of f2, and vice versa.
        share_a, share_b = (losses_a * choice.of_b).sum(), (losses_b * choice.of_a).sum()
        kept = choice.kept.clamp(min=1)
        share = (share_a + share_b) / kept
        self.backward(share)
        shares = torch.stack([share, share_a / kept, share_b / kept]).detach()
        return choice, shares, count_agreeing(logits_a, logits_b, labels, inputs["weights"])

    def _eval_first(self, inputs: Inputs, rows: int) -> _Learned:
        """Run a step with `rank: eval_first`: rank in eval mode, then train each network on its peer's choice."""
        logits_a, logits_b = self.eval_logits(inputs["images"])
        labels = self.labels_of(inputs)
        losses_a, losses_b = (target_losses(logits, labels) for logits in (logits_a, logits_b))
        choice = yield from self._choose(inputs, losses_a, losses_b)
        shares = self.learn_rows(inputs, choice.rows_b, choice.rows_a, rows, choice.kept.clamp(min=1))
        return choice, shares, count_agreeing(logits_a, logits_b, labels, inputs["weights"])


def build_pair(
    inputs: MethodInputs, plan: StaticPlan, forget_rate: float, rank: ChooseBy, ramp_epochs: int
) -> MethodTraining:
    """Build the Co-teaching task for `plan`. forget_rate: τ, or ε_S in Algorithm 3."""
    module = inputs.module()
    assert isinstance(module, TwinModel)
    schedule = ForgetSchedule(plan.batch, forget_rate, ramp_epochs)
    task = CoteachingTask(module, inputs.settings(plan), schedule, rank)
    sizes = {"selected": len(plan.selected), "candidates": len(plan.candidates)}
    return MethodTraining(task, sizes | {"forget_rate": forget_rate, "warmup_epochs": plan.candidates_from})


def forget_rate(config: CoteachingConfig, inputs: MethodInputs) -> float:
    """Return τ, the share of rows dropped once the ramp has ended."""
    if config.forget_rate == "true_ratio":
        return inputs.recipe.labels.ratio
    return inputs.incv.noise.ratio if config.forget_rate == "estimate" else config.forget_rate


def build(inputs: MethodInputs) -> MethodTraining:
    config: CoteachingConfig = inputs.fit_config(inputs.samples)
    rate = forget_rate(config, inputs)
    return build_pair(inputs, inputs.plan(inputs.samples), rate, config.rank, config.ramp_epochs)


def noise_of_selected(config: CoteachingIncvConfig, incv: IncvConfig, noise: NoiseFacts, classes: int) -> float:
    """Return ε_S, the estimated share of wrong labels in S; it sets n(e), the rows kept in epoch e."""
    rule = config.noise_of_selected
    if rule == "confident":
        return noise.selected_confident
    if rule == "held_out":
        return noise.selected_held_out
    if not isinstance(rule, str):
        return rule
    kind = incv.noise_kind if rule == "formula" else "symmetric" if rule == "formula_symmetric" else "asymmetric"
    return float(theory.noise_of_selected(noise.ratio, classes, kind))


def build_on_selection(inputs: MethodInputs) -> MethodTraining:
    """Algorithm 3: train on INCV's selected samples S, joined by the candidates C after E0 epochs."""
    recipe, incv = inputs.recipe, inputs.incv
    assert recipe.incv is not None
    config = inputs.fit_config(incv.selected)
    warmup = warmup_epochs(config, recipe.incv, incv.noise.ratio)
    plan = inputs.plan(incv.selected, incv.candidates, candidates_from=warmup)
    rate = noise_of_selected(config, recipe.incv, incv.noise, inputs.classes)
    return build_pair(inputs, plan, rate, config.rank, config.ramp_epochs)
