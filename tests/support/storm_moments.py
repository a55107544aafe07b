"""The disturbances of the storm, drawn from a seed: which event hits which rank, in which loop, at which step."""

import os
import random
from dataclasses import dataclass
from typing import Literal

SEED = int(os.environ.get("STORM_SEED", "4"))
Kind = Literal["SIGKILL", "SIGTERM", "SIGTERM to the agent", "SIGUSR2", "SIGUSR2 to the agent", "STOP file", "none"]
Phase = Literal["train", "predict", "evaluate"]
METHODS = ("standard", "coteaching", "coteaching_incv")
# Steps to be hit: late enough for a checkpoint, early enough for the wish to be obeyed in the same training.
STEPS = {"incv/0": (2, 17), "incv/1": (2, 24), "standard": (3, 43), "coteaching": (3, 43), "coteaching_incv": (3, 23)}


@dataclass(frozen=True)
class Moment:
    """One disturbance."""

    name: str
    phase: Phase
    kind: Kind
    where: str
    """As loops tell their heartbeat: `incv/0/1`, `incv/0/1 predict`, `standard`, `evaluate standard on test`."""
    number: int
    """Of the step, or of the batch of a pass."""
    rank: int
    occurrence: int = 1
    """A fold predicts after each epoch and once more: which of these passes, counted from this process's start."""
    delay: float = 0.0
    """Seconds from there to a SIGKILL."""
    slow: str | None = None
    """A training that is slowed on its way until the moment has come."""
    slow_seconds: float = 0.0
    """For each of its steps."""

    @property
    def in_coteaching(self) -> bool:
        return self.where.startswith("coteaching")

    @property
    def stage(self) -> str:
        """The name that stopped.json gives it."""
        return self.where.split("/")[0].split()[0]

    def delays(self, training: str) -> bool:
        """Whether it may cost a training steps: folds of one round are trained side by side."""
        return self.where.split()[0].rpartition("/")[0] == training.rpartition("/")[0] and (
            self.stage == "incv" or self.where == training
        )


@dataclass(frozen=True)
class Storm:
    """A run and what befalls it."""

    name: str
    moments: tuple[Moment, ...]
    overrides: tuple[str, ...] = ()


class _Dice:
    """Draws ranks, steps and delays."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._drawn = 0
        self._evaluated = self._random.sample(METHODS, len(METHODS))

    def _name(self) -> str:
        self._drawn += 1
        return f"moment-{self._drawn:02d}"

    def rank(self) -> int:
        return self._random.randrange(2)

    def _delay(self) -> float:
        return round(self._random.uniform(0.0, 0.06), 3)

    def fold(self, kind: Kind, round_: int) -> Moment:
        """In the training of one of a round's folds; rank r trains fold r."""
        rank, number = self.rank(), self._random.randint(*STEPS[f"incv/{round_}"])
        return Moment(self._name(), "train", kind, f"incv/{round_}/{rank}", number, rank, delay=self._delay())

    def method(self, kind: Kind, method: str) -> Moment:
        number = self._random.randint(*STEPS[method])
        return Moment(self._name(), "train", kind, method, number, self.rank(), delay=self._delay())

    def predict(self, kind: Kind, round_: int) -> Moment:
        """In a pass after one of the first epochs of a fold."""
        rank, batch, occurrence = self.rank(), self._random.randint(1, 5), self._random.randint(1, 4)
        where = f"incv/{round_}/{rank} predict"
        return Moment(self._name(), "predict", kind, where, batch, rank, occurrence, self._delay())

    def evaluate(self, kind: Kind) -> Moment:
        """In the pass of a method that no evaluation before was struck in."""
        where, batch = f"evaluate {self._evaluated.pop()} on test", self._random.randint(1, 3)
        return Moment(self._name(), "evaluate", kind, where, batch, self.rank(), delay=self._delay())

    def while_the_other_trains(self, kind: Kind) -> Moment:
        """Fold 0 makes its last pass, the sixth, while fold 1 is held back in its training."""
        name, batch = self._name(), self._random.randint(1, 5)
        return Moment(
            name, "predict", kind, "incv/0/0 predict", batch, 0, 6, self._delay(), slow="incv/0/1", slow_seconds=0.4
        )

    def while_the_other_waits(self, kind: Kind) -> Moment:
        """Near the end of a fold that is slow, when the other has long been done."""
        name, rank = self._name(), self.rank()
        where = f"incv/0/{rank}"
        return Moment(name, "train", kind, where, 23, rank, delay=self._delay(), slow=where, slow_seconds=0.25)

    def long_wait(self, seconds: float) -> Moment:
        """Nothing is sent: fold 1 ends later than fold 0 by more than `seconds`, which collectives have."""
        name = self._name()
        return Moment(name, "train", "none", "incv/0/1", 24, 1, slow="incv/0/1", slow_seconds=seconds / 6)


TIMEOUT_OF_LONG_WAIT = 3.0


def storms(seed: int) -> list[Storm]:
    """Twenty moments in five runs; the first run has one of each kind and phase."""
    dice = _Dice(seed)
    short = (f"execution.timeout={TIMEOUT_OF_LONG_WAIT:g}",)
    return [
        Storm(
            "first",
            (
                dice.while_the_other_trains("STOP file"),
                dice.predict("SIGKILL", 1),
                dice.method("SIGTERM to the agent", "standard"),
                dice.method("SIGUSR2", "coteaching"),
                dice.method("SIGKILL", "coteaching_incv"),
                dice.evaluate("SIGTERM"),
            ),
        ),
        Storm(
            "second",
            (
                dice.fold("SIGKILL", 0),
                dice.predict("STOP file", 1),
                dice.method("SIGTERM", "coteaching"),
                dice.method("SIGKILL", "coteaching_incv"),
                dice.evaluate("SIGKILL"),
            ),
        ),
        Storm(
            "third",
            (
                dice.predict("SIGKILL", 0),
                dice.fold("SIGUSR2 to the agent", 1),
                dice.method("STOP file", "coteaching"),
                dice.method("SIGTERM to the agent", "coteaching_incv"),
                dice.evaluate("STOP file"),
            ),
        ),
        Storm(
            "fourth",
            (
                dice.while_the_other_waits("SIGKILL"),
                dice.predict("SIGTERM", 1),
                dice.method("SIGKILL", "standard"),
            ),
        ),
        Storm("long wait", (dice.long_wait(TIMEOUT_OF_LONG_WAIT),), short),
    ]


STORMS = storms(SEED)
