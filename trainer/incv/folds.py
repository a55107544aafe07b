"""One fold: train on S and one half of C, then judge the other half."""

from collections.abc import Callable

import torch
from torch import nn

from trainer.incv.predictions import Predictions
from trainer.loading.sample_order import Ids, epoch_order
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.training.checkpoint import TrainState, load_module, module_state


def split_halves(stream: int, candidates: Ids) -> tuple[Ids, Ids]:
    """Line 4 of Algorithm 2: C cut at random into C_1 and C_2, sizes differing by at most one."""
    shuffled = epoch_order(stream, 0, candidates)
    middle = (len(shuffled) + 1) // 2
    return shuffled[:middle], shuffled[middle:]


class FoldTask(StandardTask):
    """Standard training that can remember the epoch whose network agrees best with the held-out labels."""

    def __init__(
        self, module: nn.Module, setting: TaskSettings, judge: Callable[[nn.Module], Predictions] | None
    ) -> None:
        """judge: predicts the held-out half after each epoch; None where the last epoch's network is used."""
        super().__init__(module, setting)
        self._judge = judge
        self.best_agreement = -1.0
        self.best_epoch = -1
        self._best: dict[str, torch.Tensor] = {}

    def end_epoch(self, epoch: int) -> None:
        super().end_epoch(epoch)
        if self._judge is None:
            return
        agreement = self._judge(self.module).agreement()
        if agreement > self.best_agreement:  # first of equals
            self.best_agreement, self.best_epoch = agreement, epoch
            self._best = {name: t.clone() for name, t in module_state(self.module, "best.").items()}

    def round_network(self) -> nn.Module:
        """The network that judges the held-out half."""
        if self._best:
            load_module(self.module, self._best, "best.")
        return self.module

    def state(self) -> TrainState:
        state = super().state()
        state.tensors.update(self._best)
        state.values.update(best_agreement=self.best_agreement, best_epoch=self.best_epoch)
        return state

    def load(self, state: TrainState) -> None:
        super().load(state)
        self._best = {name: t.to(self.device) for name, t in state.tensors.items() if name.startswith("best.")}
        self.best_agreement = state.values["best_agreement"]
        self.best_epoch = state.values["best_epoch"]
