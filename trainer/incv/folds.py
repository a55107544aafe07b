"""Train one fold on S and all parts of C but one; its network then predicts the held-out part."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from trainer.incv.predictions import Predictions
from trainer.loading.sample_order import Ids, epoch_order
from trainer.methods.losses import RowLosses
from trainer.methods.networks import BEST
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.training.checkpoint import TrainState, load_module, module_state


def split_parts(stream: int, candidates: Ids, folds: int = 2) -> list[Ids]:
    """Split C at random into parts C_1, C_2, ..., one per fold, whose sizes differ by at most one (Algorithm 2, line
    4)."""
    return np.array_split(epoch_order(stream, 0, candidates), folds)


class FoldTask(StandardTask):
    """Standard training that can also keep the weights of the epoch with the best held-out agreement."""

    def __init__(
        self,
        module: nn.Module,
        setting: TaskSettings,
        predict: Callable[[nn.Module], Predictions] | None,
        losses: RowLosses | None = None,
    ) -> None:
        """predict: predicts the held-out part after each epoch; None to use the last epoch's network instead."""
        super().__init__(module, setting, losses)
        self._predict = predict
        self.best_agreement = -1.0
        self.best_epoch = -1
        self._best: dict[str, torch.Tensor] = {}

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        judging = [] if self._predict is None else [partial(self._judge, self._predict, epoch)]
        return [*super().after_epoch(epoch), *judging]

    def _judge(self, predict: Callable[[nn.Module], Predictions], epoch: int) -> None:
        """Predict the held-out part, and keep the weights if it agrees better than after any epoch before."""
        with self.averaged_weights():
            agreement = predict(self.module).agreement()
            if agreement > self.best_agreement:  # among ties, keep the earliest epoch
                self.best_agreement, self.best_epoch = agreement, epoch
                self._best = {name: t.clone() for name, t in module_state(self.module, BEST).items()}

    def round_network(self) -> nn.Module:
        """Return the network that predicts the held-out part: the best epoch's with `predict`, else the last."""
        if self._best:
            load_module(self.module, self._best, BEST)
        elif self._average is not None:
            self._average.apply()
        return self.module

    def state(self) -> TrainState:
        state = super().state()
        state.tensors.update(self._best)
        state.values.update(best_agreement=self.best_agreement, best_epoch=self.best_epoch)
        return state

    def load(self, state: TrainState) -> None:
        super().load(state)
        self._best = {name: t.to(self.device) for name, t in state.tensors.items() if name.startswith(BEST)}
        self.best_agreement = state.values["best_agreement"]
        self.best_epoch = state.values["best_epoch"]
