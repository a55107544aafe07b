"""What the steps of each epoch show: pure functions of ids and random keys, which do not depend on the world size."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from trainer.loading.sample_order import (
    Ids,
    Views,
    Windows,
    candidate_rows,
    epoch_order,
    windowed_order,
)


@dataclass(frozen=True, eq=False)
class Schedule:
    """What is constant in a training job, whatever an epoch trains on."""

    stream: int
    """Random key of the job."""
    epochs: int
    steps_per_epoch: int
    rows: int
    """Rows of a full step, over all ranks."""
    samples: Ids
    """The samples that the job may train on, ascending."""

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs


Look = Literal["train", "weak", "centre"]
"""How a row shows its image: with the recipe's augmentation, with crop and flip alone, or in the centre crop."""
LOOKS: tuple[Look, ...] = get_args(Look)


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one kind in each step of an epoch, such as those of S, or of C."""

    ids: Ids
    """In the order of the steps; an id may repeat. Step p takes `ids[p * rows : (p + 1) * rows]`."""
    rows: int
    """Ids in a full step."""
    looks: tuple[Look, ...] = ("train",)
    """A step has a row for each of its ids with each of these looks."""
    may_repeat: bool = True
    """False if no id occurs twice in the epoch, which saves finding those that do."""

    def at(self, position: int) -> Ids:
        """Return the ids of one step of the epoch, over all ranks."""
        return self.ids[position * self.rows : (position + 1) * self.rows]


@dataclass(frozen=True)
class Mixing:
    """How each row of a step is mixed with another row of the same part and look."""

    alpha: float
    """The shares are drawn from Beta(alpha, alpha)."""
    kind: Literal["mixup", "cutmix"] = "mixup"


@dataclass(frozen=True)
class StepIds:
    """The sample ids of one training step, over all ranks."""

    step: int
    epoch: int
    parts: tuple[Ids, ...]
    """Of each part of the plan."""

    @property
    def selected(self) -> Ids:
        """The ids of the first part, which is S in a method with a selection."""
        return self.parts[0]

    @property
    def candidates(self) -> Ids:
        """The ids of the second part, which is C in a method with a selection; empty if there is none."""
        return self.parts[1] if len(self.parts) > 1 else self.parts[0][:0]


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """What the steps of an epoch show, over all ranks."""

    epoch: int
    parts: tuple[Part, ...]
    mixing: Mixing | None = None

    def steps(self, schedule: Schedule, first: int = 0) -> Iterator[StepIds]:
        """Yield the ids of the epoch's steps, from step `first` of the job on."""
        begin, count = self.epoch * schedule.steps_per_epoch, schedule.steps_per_epoch
        for step in range(max(first, begin), begin + count):
            yield StepIds(step, self.epoch, tuple(part.at(step - begin) for part in self.parts))

    @cached_property
    def _first_views(self) -> list[npt.NDArray[np.int64] | None]:
        """Of each part, how often the epoch has shown each id before: [len(ids)]; None if no id repeats."""
        if not any(part.may_repeat for part in self.parts):
            return [None] * len(self.parts)
        lengths = [len(part.ids) for part in self.parts]
        ids = np.concatenate([part.ids for part in self.parts])
        looks = np.repeat([len(part.looks) for part in self.parts], lengths)
        order = np.argsort(ids, kind="stable")
        before = np.cumsum(looks[order]) - looks[order]
        first = np.flatnonzero(np.diff(ids[order], prepend=-1))
        views = np.empty_like(before)
        views[order] = before - np.repeat(before[first], np.diff(np.append(first, len(ids))))
        return list(np.split(views, np.cumsum(lengths)[:-1]))

    def views(self, part: int, position: int, look: int) -> Views:
        """Return the number of the view that each row shows, for a part's rows of one look in a step.

        The views of one id in an epoch differ, also if several parts list it.
        """
        first, rows = self._first_views[part], self.parts[part].rows
        return look if first is None else first[position * rows : (position + 1) * rows] + look

    def digest(self) -> str:
        """Return a hash of all that the plan says, the same on ranks whose plans are alike."""
        found = hashlib.sha256(repr((self.epoch, self.mixing)).encode())
        for part in self.parts:
            form = part.rows, part.looks, part.may_repeat, len(part.ids)
            found.update(repr(form).encode() + part.ids.tobytes())
        return found.hexdigest()


class PlanError(ValueError):
    """A method's plan that breaks its promises."""


def require_plan(plan: EpochPlan, schedule: Schedule, epoch: int) -> None:
    """Raise PlanError unless the plan keeps what the schedule promises for this epoch."""
    if plan.epoch != epoch:
        raise PlanError(f"the plan for epoch {epoch + 1} is of epoch {plan.epoch + 1}")
    if not plan.parts or any(part.rows < 1 or not part.looks for part in plan.parts):
        raise PlanError(f"the plan of epoch {epoch + 1} needs parts with at least one row and one look a step")
    rows = sum(part.rows * len(part.looks) for part in plan.parts)
    if rows > schedule.rows:
        raise PlanError(
            f"the plan of epoch {epoch + 1} has {rows} rows a step, but the schedule of this job {schedule.rows}"
        )
    steps = [-(-len(part.ids) // part.rows) for part in plan.parts]
    if steps[0] != schedule.steps_per_epoch or max(steps) > schedule.steps_per_epoch:
        raise PlanError(
            f"the parts of the plan of epoch {epoch + 1} have ids for {' and '.join(map(str, steps))} steps, but an "
            f"epoch of this job has {schedule.steps_per_epoch}: plan that many, and repeat ids if too few are left"
        )
    for part in plan.parts:
        outside = part.ids[~np.isin(part.ids, schedule.samples)]
        if len(outside):
            raise PlanError(
                f"the plan of epoch {epoch + 1} lists sample_id {outside[0]}, which is not among the "
                f"{len(schedule.samples)} samples that the job may train on"
            )
        if not part.may_repeat and len(part.ids) and np.bincount(part.ids).max() > 1:
            raise PlanError(f"a part of the plan of epoch {epoch + 1} repeats ids: set its `may_repeat`")


@dataclass(frozen=True, eq=False)
class StaticPlan:
    """Plans every epoch from one set of ids, ahead of the training: a pure function of (stream, epoch).

    An epoch visits each id of S once and each id of C at most once.
    """

    stream: int
    selected: Ids
    batch: int
    epochs: int
    candidates: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    candidates_from: int = 0
    """First epoch that samples from C (after the warm-up E0 of Algorithm 3)."""
    windows: Windows | None = None
    """Windowed shuffling; None: every epoch is a full shuffle."""
    mixing: Mixing | None = None

    @cached_property
    def schedule(self) -> Schedule:
        samples = np.union1d(self.selected, self.candidates)
        rows = self.batch + candidate_rows(self.batch, len(self.selected), len(self.candidates))
        return Schedule(self.stream, self.epochs, -(-len(self.selected) // self.batch), rows, samples)

    @property
    def steps_per_epoch(self) -> int:
        return self.schedule.steps_per_epoch

    @property
    def total_steps(self) -> int:
        return self.schedule.total_steps

    def plan_epoch(self, epoch: int) -> EpochPlan:
        parts = [Part(self._order(self.selected, epoch), self.batch, may_repeat=False)]
        rows = candidate_rows(self.batch, len(self.selected), len(self.candidates))
        if rows and epoch >= self.candidates_from:
            # The last step may have fewer ids of S, and then has fewer of C; the steps before it are full.
            last = len(self.selected) - (self.steps_per_epoch - 1) * self.batch
            used = (self.steps_per_epoch - 1) * rows + candidate_rows(last, len(self.selected), len(self.candidates))
            parts.append(Part(self._order(self.candidates, epoch)[:used], rows, may_repeat=False))
        return EpochPlan(epoch, tuple(parts), self.mixing)

    def _order(self, ids: Ids, epoch: int) -> Ids:
        if self.windows is None:
            return epoch_order(self.stream, epoch, ids)
        return windowed_order(self.stream, epoch, ids, self.windows.shards[ids], self.windows.window)

    def plans(self, first: int = 0) -> Iterator[EpochPlan]:
        """Yield the plan of each epoch, from that of step `first` on."""
        return map(self.plan_epoch, range(first // self.steps_per_epoch, self.epochs))

    def steps(self, first: int = 0) -> Iterator[StepIds]:
        """Yield the ids of all steps from `first` on."""
        return (at for plan in self.plans(first) for at in plan.steps(self.schedule, first))
