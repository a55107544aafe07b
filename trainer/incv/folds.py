"""The folds of a round: their parts, which of them train side by side, and the Task that trains one of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from shards.errors import ConfigError
from trainer.config.schema import ExecutionConfig
from trainer.distributed.world import World
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


def folds_side_by_side(folds: int, execution: ExecutionConfig, world: World) -> bool:
    """Whether each half of the ranks trains every second fold, at the same time as the other half.

    folds: that a round trains.
    """
    if folds == 1:
        return False
    if execution.folds == "side_by_side" and world.size % 2 and world.size > 1:
        raise ConfigError(
            f"`execution.folds: side_by_side` needs a single process or an even number of them, not {world.size}: "
            "set execution.folds to auto"
        )
    if execution.folds == "side_by_side" and folds % 2 and world.size > 1:
        raise ConfigError(
            f"`execution.folds: side_by_side` needs a single process or an even number of folds, not {folds}: "
            "set execution.folds to auto, or incv.folds to an even number"
        )
    return execution.folds != "in_turn" and world.size % 2 == 0 and folds % 2 == 0


def folds_share_device(execution: ExecutionConfig, world: World, small: bool) -> bool:
    """Whether a single process trains all folds of a round at once.

    small: whether the images are small enough to stay on the device. One fold with such images underuses a GPU, while
    large images saturate it.
    """
    if world.size > 1 or execution.folds == "in_turn":
        return False
    return execution.folds == "side_by_side" or (small and world.device.type == "cuda")
