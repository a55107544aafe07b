"""D2L (Ma et al. 2018): once the dimensionality of the features rises, targets are mixed with predictions."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from trainer.acceleration.cuda_graphs import Inputs, StaticSizes
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import StepIds
from trainer.loading.sample_order import Ids, derive_stream
from trainer.methods.built_in import D2lConfig
from trainer.methods.dimensionality import draw_batches, is_turning_point, label_share, mean_lid
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.losses import target_losses
from trainer.methods.standard import StandardTask
from trainer.methods.targets import mix_pairs
from trainer.methods.task import TaskSettings
from trainer.training.checkpoint import TrainState, load_module, module_state

_log = logging.getLogger(__name__)

_PREVIOUS, _PREVIOUS_AVERAGE = "previous.", "previous_ema."
"""Prefixes in a checkpoint of the weights at the end of the last epoch, and of their average (`ema`)."""

MeasureLid = Callable[[nn.Module, int], float | None]
"""Returns the LID of a network's features after an epoch, the same on all ranks; None if there is no
estimate. All ranks call it."""


@dataclass(frozen=True)
class TurningRule:
    """When the training may turn."""

    epochs: int
    """E: epochs of the whole training."""
    initial: int
    """Epochs before LIDs are compared."""
    window: int


@dataclass(frozen=True)
class LidHistory:
    """What is known after an epoch, and decides about the targets of the next."""

    ended: int = 0
    """Finished epochs."""
    lids: tuple[float, ...] = ()
    """The LID after each epoch."""
    turned_after: int | None = None
    """Number of finished epochs at the turning point; None before it."""
    alpha: float = 1.0
    """Share of the given label in the targets."""

    def after(self, lid: float | None, rule: TurningRule) -> "LidHistory":
        """Return the history after one more epoch. lid: None if there is no estimate, so that the last one is
        repeated."""
        ended = self.ended + 1
        newest = self.lids[-1:] if lid is None else (lid,)
        lids, turned_after = (*self.lids, *newest), self.turned_after
        # At the end of the training there is no epoch left that could follow a turn.
        if turned_after is None and ended < rule.epochs:
            turned_after = ended if is_turning_point(lids, ended, rule.initial, rule.window) else None
        alpha = 1.0 if turned_after is None else label_share(lids, ended, rule.epochs)
        return LidHistory(ended, lids, turned_after, alpha)


class D2lTask(StandardTask):
    """Standard training up to the turning point; from then on the targets are α·label + (1 - α)·prediction."""

    def __init__(self, module: nn.Module, setting: TaskSettings, rule: TurningRule, measure: MeasureLid) -> None:
        super().__init__(module, setting)
        self._rule, self._measure = rule, measure
        self.history = LidHistory()
        self._alpha = torch.ones((), device=self.device)
        self._previous: dict[str, torch.Tensor] = {}

    def inputs(self, batch: Batch, at: StepIds) -> tuple[Inputs, StaticSizes]:
        inputs, sizes = super().inputs(batch, at)
        return {**inputs, "alpha": self._alpha}, sizes

    def row_losses(self, logits: torch.Tensor, targets: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        predicted = logits.detach().argmax(dim=1)
        mixed = mix_pairs(targets, predicted, inputs["alpha"].expand(len(targets)), logits.shape[1])
        return target_losses(logits, mixed, self.smoothing)

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        return [*super().after_epoch(epoch), partial(self._follow_lid, epoch)]

    def _follow_lid(self, epoch: int) -> None:
        """Measure the LID; at the turning point, return to the weights at the end of the epoch before."""
        before, self.history = self.history, self.history.after(self._measure(self.module, epoch), self._rule)
        turns = before.turned_after is None and self.history.turned_after is not None
        if turns:
            _log.info("d2l: the LID rises after epoch %d: back to the weights of the epoch before", epoch + 1)
            self._restore_previous()
        self._apply_history()
        self._previous = self._copy_weights() if self._may_turn_next() else {}

    def _may_turn_next(self) -> bool:
        following = self.history.ended + 1
        rule = self._rule
        return self.history.turned_after is None and rule.initial + rule.window <= following < rule.epochs

    def _apply_history(self) -> None:
        self._alpha.fill_(self.history.alpha)
        if self.history.lids:
            self.epoch_metrics = {"lid": round(self.history.lids[-1], 6), "alpha": round(self.history.alpha, 6)}

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        """Copy weights and BatchNorm statistics, which are equal on all ranks after an epoch, and their average."""
        live = module_state(self.module, _PREVIOUS)
        if self._average is not None:
            live |= {f"{_PREVIOUS_AVERAGE}{name}": tensor for name, tensor in self._average.state().items()}
        return {name: tensor.detach().clone() for name, tensor in live.items()}

    def _restore_previous(self) -> None:
        """Load the copy in place. The optimiser's moments stay as they are."""
        load_module(self.module, self._previous, _PREVIOUS)
        self._engine.sync_weights()
        if self._average is not None:
            averages = {name.removeprefix(_PREVIOUS_AVERAGE): t for name, t in self._previous.items()}
            self._average.load(averages)

    def state(self) -> TrainState:
        state = super().state()
        state.tensors.update(self._previous)
        state.values["lid_history"] = asdict(self.history)
        return state

    def load(self, state: TrainState) -> None:
        super().load(state)
        prefixes = (_PREVIOUS, _PREVIOUS_AVERAGE)
        self._previous = {n: t.to(self.device) for n, t in state.tensors.items() if n.startswith(prefixes)}
        saved = state.values["lid_history"]
        self.history = LidHistory(**{**saved, "lids": tuple(saved["lids"])})
        self._apply_history()


def measure_lid(inputs: MethodInputs, network: nn.Module, epoch: int) -> float | None:
    """Return the mean LID of batches that are drawn from the training samples, with images in the centre crop."""
    config = inputs.config
    stream = derive_stream(inputs.recipe.seed, f"{inputs.name}.lid")
    batches = draw_batches(stream, epoch, inputs.samples, config.lid_rows, config.lid_batches)
    drawn: Ids = np.concatenate(batches)
    table = inputs.passes.run(network, drawn, ("features",), doing="measuring the LID")
    table = table.rows(table.usable).to(torch.device("cpu"))
    # Decided by one rank, since all must turn alike, whatever their processors round.
    lid: float | None = inputs.world.broadcast_from_rank0(
        lambda: mean_lid(table["features"], table.ids.numpy(), batches, neighbours=config.neighbours)
    )
    return lid


def initial_epochs(config: D2lConfig) -> int:
    """Return the number of epochs before LIDs are compared."""
    return round(config.epochs / 3) if config.initial_epochs == "auto" else config.initial_epochs


def build(inputs: MethodInputs) -> MethodTraining:
    plan, config = inputs.plan(inputs.samples), inputs.fit_config(inputs.samples)
    rule = TurningRule(plan.epochs, initial_epochs(config), config.window)
    task = D2lTask(inputs.module(), inputs.settings(plan), rule, partial(measure_lid, inputs))
    return MethodTraining(task, {"initial_epochs": rule.initial})
