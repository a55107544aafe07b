"""A training method in its own package, which looks at its data before every epoch.

It re-labels the samples that the network is sure of, keeps those whose neighbours agree, balances the classes, and
trains on two augmented views of each row with mixup and soft targets.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from trainer.config.fitting import count_steps
from trainer.config.schema import TrainingConfig
from trainer.config.section import Positive, Ratio
from trainer.distributed.world import World
from trainer.loading.epoch_plan import EpochPlan, Mixing, Part
from trainer.loading.sample_order import Ids, epoch_order
from trainer.methods.inputs import MethodInputs, MethodTraining
from trainer.methods.method import Epochs, ExpectedSizes, Method
from trainer.methods.standard import StandardTask
from trainer.methods.task import TaskSettings
from trainer.passes.sample_pass import SamplePass

_LOOKS = ("train", "train")
_LABEL_SHARE = 0.5
"""Share of the given label in the target of a sample that the network is not sure of."""
_SIMILARITY_STEPS = 2**20
"""Similarities are rounded to this fraction of 1, so that rounding errors do not choose between equal images."""
_BLOCK = 2**24
"""Pairs of samples that are compared at a time."""


class RelabelConfig(TrainingConfig):
    """Re-labels sure samples before every epoch, and trains on those whose neighbours agree with their label."""

    threshold: Ratio = 0.9
    """A sample gets the likeliest class as its label if its probability exceeds this."""
    neighbours: Positive = 10
    """Number of nearest neighbours, by features, that vote about a sample."""
    warm_epochs: Annotated[int, Field(ge=0)] = 10
    """Epochs on all given labels before the first re-labelling."""


class RelabelTask(StandardTask):
    def __init__(self, module: nn.Module, setting: TaskSettings, config: RelabelConfig, passes: SamplePass) -> None:
        """setting: its targets are the given labels as probabilities."""
        super().__init__(module, setting)
        self._config, self._passes = config, passes
        self._given = self.targets.clone()
        self._keep = torch.ones(len(self.targets), dtype=torch.bool, device=self.device)
        self.tables = {"targets": self.targets, "keep": self._keep}

    def prepare_epoch(self, epoch: int) -> None:
        """Re-label all samples and vote about them; samples that cannot be read keep their label and are left out."""
        if epoch < self._config.warm_epochs:
            return
        with self.averaged_weights():
            table = self._passes.run(
                self.module, self.schedule.samples, ("features", "probabilities"), doing="re-labelling"
            )
        table = table.rows(table.usable)
        targets, keep = self._given.clone(), torch.zeros_like(self._keep)
        targets[table.ids] = soft_targets(self._given[table.ids], table["probabilities"], self._config.threshold)
        labels = targets[table.ids].argmax(1)
        keep[table.ids] = vote_on_ranks(self.world, table["features"], labels, self._config.neighbours)
        self.targets.copy_(targets)
        self._keep.copy_(keep)

    def plan_epoch(self, epoch: int) -> EpochPlan:
        samples, stream, rows = self.schedule.samples, self.schedule.stream, self.schedule.rows // len(_LOOKS)
        kept = samples[self._keep.cpu().numpy()[samples]]
        ids = kept if len(kept) else samples
        labels = self.targets.argmax(1).cpu().numpy()[ids]
        dealt = balance_classes(stream, epoch, ids, labels, self.schedule.steps_per_epoch * rows)
        mixing = Mixing(self._config.mixup.alpha) if self._config.mixup.alpha else None
        return EpochPlan(epoch, (Part(dealt, rows, _LOOKS),), mixing)

    @property
    def epoch_metrics(self) -> Mapping[str, float]:
        """From the tables alone, so that a resumed training logs the same."""
        ids = torch.from_numpy(self.schedule.samples).to(self.device)
        changed = self.targets[ids].argmax(1) != self._given[ids].argmax(1)
        shares = {"relabelled": changed, "kept": self._keep[ids]}
        return {name: round(float(share.double().mean()), 6) for name, share in shares.items()}


def soft_targets(given: torch.Tensor, probabilities: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the likeliest class where its probability exceeds the threshold, else label and probabilities mixed.

    All float32 [samples, classes].
    """
    likeliest = F.one_hot(probabilities.argmax(1), given.shape[1]).float()
    mixed = _LABEL_SHARE * given + (1 - _LABEL_SHARE) * probabilities
    return torch.where(probabilities.amax(1, keepdim=True) > threshold, likeliest, mixed)


def vote_on_ranks(world: World, features: torch.Tensor, labels: torch.Tensor, neighbours: int) -> torch.Tensor:
    """Return whether the neighbours of each sample agree with its label: bool [samples].

    Each rank judges its share and no other, so that all hold the same result, whatever their processors round.
    """
    own = torch.arange(len(labels), device=labels.device)[world.rank :: world.size]
    agree = torch.zeros(len(labels), dtype=torch.int32, device=labels.device)
    agree[own] = neighbours_agree(features, labels, own, neighbours).int()
    return world.all_reduce(agree) > 0


def neighbours_agree(
    features: torch.Tensor, labels: torch.Tensor, asked: torch.Tensor, neighbours: int
) -> torch.Tensor:
    """Return whether no class has more votes of the nearest neighbours than a sample's own label: bool [asked].

    Args:
        features: [samples, width], in the order of the ids; of equally near ones the first are nearest.
        labels: int64 [samples]
        asked: positions of the samples in question, whose neighbours are searched among all others.
    """
    directions, samples = F.normalize(features.double()), len(features)
    neighbours = min(neighbours, samples - 1)
    if neighbours < 1:
        return torch.ones(len(asked), dtype=torch.bool, device=features.device)
    classes, later = int(labels.max()) + 1, torch.arange(samples, device=features.device)
    found = []
    for block in asked.split(max(1, _BLOCK // samples)):
        similarity = (directions[block] @ directions.T * _SIMILARITY_STEPS).round().long()
        nearness = similarity * samples - later  # no two are equal
        nearness.scatter_(1, block[:, None], torch.iinfo(torch.int64).min)
        nearest = nearness.topk(neighbours, dim=1).indices
        votes = F.one_hot(labels[nearest], classes).sum(1)
        found.append(votes.gather(1, labels[block][:, None])[:, 0] == votes.amax(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool, device=features.device)


def balance_classes(stream: int, epoch: int, ids: Ids, labels: npt.NDArray[np.int64], count: int) -> Ids:
    """Return `count` ids in random order, as many of each class, to within one; rare classes are repeated.

    A pure function of (stream, epoch) and the ids with their labels.
    """
    classes = epoch_order(stream, epoch, np.unique(labels))
    shares = [len(part) for part in np.array_split(np.arange(count), len(classes))]
    each = [epoch_order(stream, epoch, ids[labels == one]) for one in classes]
    dealt = np.concatenate([np.resize(own, share) for own, share in zip(each, shares, strict=True)])
    return dealt[epoch_order(stream, epoch, np.arange(count))]


def build(inputs: MethodInputs) -> MethodTraining:
    steps, rows = count_steps(len(inputs.samples), inputs.recipe.batch.rows), inputs.recipe.batch.rows
    setting = inputs.settings(inputs.schedule(steps, len(_LOOKS) * rows))
    given = F.one_hot(setting.targets.clamp(min=0), inputs.classes).float()
    config = inputs.fit_config(inputs.samples)
    return MethodTraining(RelabelTask(inputs.module(), replace(setting, targets=given), config, inputs.passes))


def _expect_epochs(config: RelabelConfig, sizes: ExpectedSizes) -> list[Epochs]:
    return [Epochs(config.epochs, len(_LOOKS) * sizes.samples)]


def _expect_passes(config: RelabelConfig, sizes: ExpectedSizes) -> float:
    return max(config.epochs - config.warm_epochs, 0) / config.epochs


METHOD = Method(
    "relabel",
    "Re-labelling",
    RelabelConfig,
    "incv_relabel:build",
    inputs=("features",),
    epochs=_expect_epochs,
    passes_per_epoch=_expect_passes,
    supports_mixup=True,
)
