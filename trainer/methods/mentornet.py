"""MentorNet PD (Jiang et al. 2018): one network, whose rows are weighted by a predefined curriculum.

The authors train a small network, the mentor, to imitate this curriculum; here its weights are computed in closed
form. All constants, and what follows, are those of the authors' code (`vstar_mentornet_pd` and `mentornet` in
github.com/google/mentornet) with the options of its MentorNet PD runs on CIFAR-10 with a ResNet.

- The training is divided into hundredths, counted in steps. During the first 19 all rows have weight 1. Then rows
  whose loss is at most the threshold have weight 1, the others 0. During the last 10 the weight falls linearly, from
  1 at the threshold to 0 at γ = 1 above it.
- The threshold is a moving average of a percentile of the losses of a step, the present step included.
- Example dropout sets the weight of half of the rows to 0 during the first 17 hundredths, then of 5 %. The authors
  drop exactly this share of a batch. Here each sample is dropped with this probability, by a hash of seed, epoch and
  `sample_id`, so that neither the number of ranks nor a resume changes it.
- The weighted losses are divided by the number of rows, whatever their weights. The authors also scale the weight
  decay by the mean weight; here the optimiser decays the weights as in every other method.
"""

from collections.abc import Generator
from enum import IntEnum

import numpy as np
import torch
from torch import nn

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram, SyncPoint
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StepIds
from trainer.loading.sample_order import Ids, draw_uniforms
from trainer.loading.transfer import copy_to_device
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import target_losses
from trainer.methods.targets import agreement, look_up
from trainer.methods.task import BaseTask, TaskSettings
from trainer.models.frozen import set_train_mode
from trainer.records.metrics import COUNTED

_BURN_IN, _LATE = 19, 90  # hundredths of the training
_GAMMA = 1.0
_DECAY = 0.5  # share of the moving threshold that each step keeps
_EARLY_DROPOUT, _DROPOUT, _EARLY = 0.5, 0.05, 17


class Phase(IntEnum):
    """What the weights of a step depend on."""

    BURN_IN = 0
    SELECT = 1
    LATE = 2


def phase_at(step: int, total_steps: int) -> Phase:
    """Return the phase of a step, counted from 0."""
    hundredth = 100 * step // total_steps
    return Phase.BURN_IN if hundredth < _BURN_IN else Phase.SELECT if hundredth < _LATE else Phase.LATE


def dropout_rate(step: int, total_steps: int) -> float:
    """Return the probability with which example dropout ignores a row of a step, counted from 0."""
    return _EARLY_DROPOUT if 100 * step // total_steps < _EARLY else _DROPOUT


def percentile_of(losses: torch.Tensor, weights: torch.Tensor, share: float) -> torch.Tensor:
    """Return the loss of the row nearest to the given share of the real rows, sorted by loss: [].

    losses: [rows]; weights: [rows], 0 for rows that do not count. Infinite if no row counts.
    """
    ordered = torch.where(weights > 0, losses, torch.inf).sort().values
    last = (torch.count_nonzero(weights) - 1).clamp(min=0)
    place = (share * last.double() + 0.5).floor().long()
    return ordered.gather(0, place[None])[0]  # ordered[place] would be a host-device sync


def move_threshold(threshold: torch.Tensor, percentile: torch.Tensor) -> torch.Tensor:
    """Return the moving average of the percentiles after a step's percentile: []."""
    return _DECAY * threshold + (1 - _DECAY) * percentile


def weigh_losses(losses: torch.Tensor, threshold: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """Return the curriculum's weight of each row, from 0 to 1: [rows].

    losses: [rows], without gradients; threshold: []; phase: int64 [], a `Phase`.
    """
    above = losses - threshold.to(losses.dtype)
    small = (above <= 0).to(losses.dtype)
    falling = (1 - above / _GAMMA).clamp(0, 1)
    late = torch.where(phase == int(Phase.LATE), falling, small)
    return torch.where(phase == int(Phase.BURN_IN), torch.ones_like(losses), late)


class MentorNetTask(BaseTask):
    """Trains one network on rows that are weighted by their loss; cannot split a step into micro-batches."""

    def __init__(self, module: nn.Module, setting: TaskSettings, share: float, stream: int, samples: int) -> None:
        """share: the percentile of the losses, from 0 to 1; stream: random key of the training; samples: the largest
        sample_id + 1."""
        super().__init__(module, setting)
        self._share, self._stream = share, stream
        # Captured CUDA graphs refer to these tensors, so they are only ever changed in place.
        self._threshold = torch.zeros((), dtype=torch.float64, device=self.device)
        self.tables = {"threshold": self._threshold}
        self._draws = torch.zeros(samples, device=self.device)
        self._draws_epoch = -1
        self._curriculum: dict[tuple[Phase, float], Inputs] = {}

    def inputs(self, batch: Batch, at: StepIds) -> tuple[Inputs, StaticSizes]:
        inputs, fixed = super().inputs(batch, at)
        self._draw(at.epoch)
        return {**inputs, **self._curriculum_at(at.step)}, fixed

    def _curriculum_at(self, step: int) -> Inputs:
        """Return what the curriculum sets for a step; the same tensors as long as nothing changes."""
        phase, rate = phase_at(step, self.schedule.total_steps), dropout_rate(step, self.schedule.total_steps)
        if (phase, rate) not in self._curriculum:
            self._curriculum[phase, rate] = {
                "phase": torch.full((), int(phase), device=self.device),
                "dropout": torch.full((), rate, device=self.device),
            }
        return self._curriculum[phase, rate]

    def _draw(self, epoch: int) -> None:
        """Draw the numbers of example dropout for all samples, once an epoch: one copy, instead of one a step."""
        if epoch != self._draws_epoch:
            ids: Ids = np.arange(len(self._draws), dtype=np.int64)
            drawn = draw_uniforms(self._stream, epoch, ids, "example dropout").astype(np.float32)
            self._draws.copy_(copy_to_device(self.device, drawn)[0])
            self._draws_epoch = epoch

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        self.begin_step()
        set_train_mode(self.module)
        labels, weights = look_up(self.targets, inputs["ids"]), inputs["weights"]
        logits = self.forward(inputs["images"])
        assert isinstance(logits, torch.Tensor)
        losses = target_losses(logits, labels)
        plain = losses.detach()
        percentile, count = yield from self._measure(plain, weights)
        threshold = move_threshold(self._threshold, percentile)
        kept = (self._draws[inputs["ids"].clamp(min=0)] >= inputs["dropout"]).to(plain.dtype)
        given = weigh_losses(plain, threshold, inputs["phase"]) * kept * weights
        if self.smoothing:  # the weights depend on how well the given labels are explained
            losses = target_losses(logits, labels, self.smoothing)
        rows = count.clamp(min=1)
        # Multiplied, not selected: a loss that is not finite must end in NaN, which `update` recognises.
        share = (losses * given).sum() / rows
        self.backward(share)
        agreed = (agreement(logits.detach(), labels) * weights).sum()
        loss, agreed, weight = yield from self.reduce_gradients(share.detach(), agreed, given.sum())
        counted = count > 0
        ok = self.update(loss, counted)
        self._threshold.copy_(torch.where(ok, threshold, self._threshold))
        return {
            "loss": torch.where(counted, loss, 0.0),
            "train_accuracy": agreed / rows,
            "mean_weight": weight / rows,
            "loss_threshold": torch.where(counted, threshold, 0.0).to(loss.dtype),
            COUNTED: counted.to(loss.dtype),
        }

    def _measure(
        self, losses: torch.Tensor, weights: torch.Tensor
    ) -> Generator[SyncPoint, None, tuple[torch.Tensor, torch.Tensor]]:
        """Return the percentile of the losses of all ranks, and the number of real rows: [] each.

        Every rank fills its own part of an array over all ranks, so the sum is the array that one process would sort.
        """
        everywhere = losses.new_zeros(2, self.world.size, len(losses))
        everywhere[:, self.world.rank] = torch.stack([losses, weights.to(losses.dtype)])
        yield SyncPoint((everywhere,))
        every, real = everywhere.flatten(1)
        return percentile_of(every, real, self._share), real.sum()


def build(inputs: MethodInputs) -> MethodTraining:
    plan = inputs.plan(inputs.samples)
    share = inputs.config.loss_percentile
    samples = int(inputs.samples.max()) + 1
    task = MentorNetTask(inputs.module(), inputs.settings(plan), share, plan.stream, samples)
    return MethodTraining(task, {"loss_percentile": share})
