"""Evaluates a training every few epochs, keeps the best weights beside the last, and ends it by patience."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import nn

from trainer.config.optimisation import EvaluationConfig
from trainer.loading.batch import Batch
from trainer.loading.epoch_plan import EpochPlan, Schedule, StepIds
from trainer.methods.networks import BEST, list_networks
from trainer.methods.task import BaseTask
from trainer.training.checkpoint import TrainState, module_state


@dataclass(frozen=True)
class Accuracy:
    """Top-1 accuracy of a method's networks on one set, from 0 to 1."""

    mean: float
    each: tuple[float, ...]
    """Of network a and, if the method trains a pair, of network b."""

    @classmethod
    def of_hits(cls, hits: Sequence[float], count: float) -> "Accuracy":
        """hits: of each network; count: images of the set."""
        if not count:
            return cls(0.0, (0.0,) * len(hits))
        return cls(sum(hits) / (len(hits) * count), tuple(hit / count for hit in hits))


Measure = Callable[[Sequence[nn.Module]], dict[str, Accuracy]]
"""Returns the accuracy of the networks on each evaluation set; all ranks call it."""


@dataclass(frozen=True)
class BestEpoch:
    """The epoch with the highest accuracy so far; of equal ones the first."""

    accuracy: float = -1.0
    epoch: int = -1
    """Counted from 0."""
    waited: int = 0
    """Evaluations since then."""

    def after(self, epoch: int, accuracy: float) -> "BestEpoch":
        if accuracy > self.accuracy:
            return BestEpoch(accuracy, epoch)
        return BestEpoch(self.accuracy, self.epoch, self.waited + 1)


class EvaluatedTask:
    """A Task that evaluates its networks (their average, with `ema`) at the end of every few epochs."""

    def __init__(self, task: BaseTask, config: EvaluationConfig, measure: Measure) -> None:
        self._task, self._config, self._measure = task, config, measure
        self.best = BestEpoch()
        self._weights: dict[str, torch.Tensor] = {}
        self._measured: dict[str, float] = {}

    @property
    def schedule(self) -> Schedule:
        return self._task.schedule

    @property
    def plans_ahead(self) -> bool:
        return self._task.plans_ahead

    @property
    def learning_rate(self) -> float:
        return self._task.learning_rate

    @property
    def chosen(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._task.chosen

    @property
    def has_ended(self) -> bool:
        return self._task.has_ended or 0 < self._config.patience <= self.best.waited

    def step(self, batch: Batch, at: StepIds) -> Mapping[str, torch.Tensor]:
        return self._task.step(batch, at)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        return self._task.plan_epoch(epoch)

    def prepare_epoch(self, epoch: int) -> None:
        self._task.prepare_epoch(epoch)

    def require_finite(self, wait: bool = True) -> None:
        self._task.require_finite(wait)

    def close(self) -> None:
        self._task.close()

    @property
    def epoch_metrics(self) -> Mapping[str, float]:
        return {**self._task.epoch_metrics, **self._measured}

    def after_epoch(self, epoch: int) -> list[Callable[[], None]]:
        self._measured = {}
        last = epoch + 1 == self._task.schedule.epochs  # always evaluated
        evaluation = [] if (epoch + 1) % self._config.every and not last else [partial(self._evaluate, epoch)]
        return [*self._task.after_epoch(epoch), *evaluation]

    def _evaluate(self, epoch: int) -> None:
        module = self._task.module
        with self._task.averaged_weights():
            accuracies = self._measure(list_networks(module))
            if self._config.choose_on is not None:
                self.best = self.best.after(epoch, accuracies[self._config.choose_on].mean)
                if self.best.epoch == epoch:
                    self._weights = {name: tensor.clone() for name, tensor in module_state(module, BEST).items()}
        self._measured = _name_metrics(accuracies)

    def state(self) -> TrainState:
        state = self._task.state()
        state.tensors.update(self._weights)
        state.values.update(best_epoch=asdict(self.best), has_ended=self.has_ended)
        return state

    def load(self, state: TrainState) -> None:
        self._task.load(state)
        device = self._task.device
        self._weights = {name: tensor.to(device) for name, tensor in state.tensors.items() if name.startswith(BEST)}
        self.best = BestEpoch(**state.values["best_epoch"]) if "best_epoch" in state.values else BestEpoch()


def _name_metrics(accuracies: Mapping[str, Accuracy]) -> dict[str, float]:
    """Return the metrics `accuracy.<set>`, the mean over the networks, and of a pair also `accuracy_a.<set>` and
    `accuracy_b.<set>`."""
    metrics = {f"accuracy.{name}": round(found.mean, 6) for name, found in accuracies.items()}
    for name, found in accuracies.items():
        if len(found.each) > 1:
            metrics |= {f"accuracy_{a}.{name}": round(one, 6) for a, one in zip("ab", found.each, strict=True)}
    return metrics
