"""Decoupling (Malach and Shalev-Shwartz 2017): two networks that learn only where their predictions differ.

Each step shows both networks the same rows. Each of them learns from its own loss on the rows whose predicted
classes differ. The sum of these losses is divided by the number of such rows, but at least by a tenth of the batch,
as in the authors' code: when the networks nearly agree, the few rows left must not get the weight of a whole batch.
There are no epochs on all rows first (the authors' default).

With `compare: one_pass`, the predictions are those of the training forward, as in the authors' code. With
`eval_first` they are those of a forward in eval mode, and BatchNorm then sees only the rows that differ.
"""

import torch

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes, StepProgram
from trainer.methods.built_in import ChooseBy, DecouplingConfig
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import target_losses
from trainer.methods.pair import PairTask, count_agreeing, order_rows, pair_values
from trainer.methods.task import TaskSettings
from trainer.models.frozen import set_train_mode
from trainer.models.twin import TwinModel

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


_Learned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of this rank: its share of the loss of both networks together, of network a and of network b, [3]; how many of its
rows' labels network a and network b predict, [2]; and the number of its rows whose predictions differ, []."""


class DecouplingTask(PairTask):
    """Trains a TwinModel: each network learns from its own loss on the rows whose predictions differ."""

    def __init__(self, module: TwinModel, setting: TaskSettings, compare: ChooseBy = "one_pass") -> None:
        super().__init__(module, setting)
        self._compare = compare

    def compute_step(self, inputs: Inputs, fixed: StaticSizes) -> StepProgram:
        self.begin_step()
        weights = inputs["weights"]
        # The divisor is known after the last micro-batch of the last rank only, so the gradients are those of the
        # losses divided by a constant, and are scaled to the divisor in the end.
        constant = float(self.world.size * len(weights))
        learn = self._one_pass if self._compare == "one_pass" else self._eval_first
        shares, agreed, differ = learn(inputs, constant)
        totals = yield from self.reduce_gradients(*shares, *agreed, differ, weights.sum())
        losses, agreed, differ, rows = totals[:3], totals[3:5], totals[5], totals[6]
        factor = constant / divisor_of(differ, rows)
        self.scale_gradients(factor)
        losses = losses * factor
        self.update(losses[0], rows > 0)
        return pair_values(losses, agreed, rows) | {"disagreement": differ / rows.clamp(min=1)}

    def _one_pass(self, inputs: Inputs, divisor: float) -> _Learned:
        """Run a step with `compare: one_pass`: learn where the predictions of the training forward differ."""
        set_train_mode(self.module)
        every = inputs["weights"]
        shares, agreed, differ = every.new_zeros(3), every.new_zeros(2), every.new_zeros(())
        given, parts = self.labels_of(inputs), self.parts(len(every))
        for part in parts:
            labels, weights, last = given[part], every[part], part is parts[-1]
            logits_a, logits_b = self.forward(inputs["images"][part], last=last)
            learnt = find_disagreements(logits_a, logits_b, weights)
            losses_a, losses_b = (target_losses(logits, labels, self.smoothing) for logits in (logits_a, logits_b))
            # Multiplied, not selected: a loss that is not finite must end in NaN, which `update` recognises.
            share = ((losses_a + losses_b) * learnt).sum() / divisor
            self.backward(share, last)
            each = (torch.stack([losses_a, losses_b]).detach() * learnt).sum(dim=1) / divisor
            shares = shares + torch.cat([share.detach()[None], each])
            agreed = agreed + count_agreeing(logits_a, logits_b, labels, weights)
            differ = differ + learnt.sum()
        return shares, agreed, differ

    def _eval_first(self, inputs: Inputs, divisor: float) -> _Learned:
        """Run a step with `compare: eval_first`: compare in eval mode, then learn from the rows that differ alone."""
        logits_a, logits_b = self.eval_logits(inputs["images"])
        weights = inputs["weights"]
        learnt = find_disagreements(logits_a, logits_b, weights)
        rows = order_rows(torch.arange(len(weights), device=self.device), learnt > 0)
        shares = self.learn_rows(inputs, rows, rows, len(weights), divisor)
        # NaN if an output for a real row is not finite, even if it is not among the rows that are learnt from.
        finite = torch.isfinite(logits_a).all(dim=1) & torch.isfinite(logits_b).all(dim=1)
        poison = torch.zeros_like(weights).masked_fill(~finite & (weights > 0), torch.nan).sum()
        agreed = count_agreeing(logits_a, logits_b, self.labels_of(inputs), weights)
        return shares + poison, agreed, learnt.sum()


def build(inputs: MethodInputs) -> MethodTraining:
    config: DecouplingConfig = inputs.config
    module = inputs.module()
    assert isinstance(module, TwinModel)
    plan = inputs.plan(inputs.samples)
    return MethodTraining(DecouplingTask(module, inputs.settings(plan), config.compare))
