"""Chooses the recipe of an audit from the data set, the initial weights and the device: pure functions."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config.schema import NO_NETWORK, Trainable
from trainer.incv.feature_judge import FOLDS

_STEPS_PER_EPOCH = {16: 0, 32: 10, 64: 10, 128: 25}
"""For each batch size, the minimum steps per epoch of a fold. With 25, six epochs have the minimum steps of
FROM_WEIGHTS, so the largest batch never costs additional epochs."""
_SCRATCH_SIZE = {"cpu": 64, "cuda": 128}
_MARGIN = 1.125
"""Images are resized to this many times the side of the network's input, so that crops vary."""


@dataclass(frozen=True)
class Start:
    """The network of an audit and where its weights come from."""

    model: str
    weights: str | None = None
    """A file of weights."""
    pretrained: bool = False
    """Whether timm's weights of `model` are used."""
    image: dict[str, Any] = field(default_factory=dict)
    """The image keys (size, mean, std) that the weights expect; empty without weights."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the architecture."""
    sizes: tuple[int, ...] = ()
    """Sizes of images to choose from, largest first; the first is that of `image`."""
    why_no_weights: str = ""
    """Why the network starts from random weights, in a few words; empty with weights."""

    @property
    def has_weights(self) -> bool:
        return self.pretrained or self.weights is not None

    def at_size(self, size: int) -> "Start":
        """Return the same network on images of another size."""
        return replace(self, image=self.image | {"size": size})


@dataclass(frozen=True)
class Schedule:
    """How long the folds train, and how fast they learn."""

    steps: int
    """Minimum number of steps of a fold."""
    epochs: int
    """Minimum number of epochs of a fold."""
    learning_rate: float
    rounds: int
    trainable: Trainable


FROM_WEIGHTS = Schedule(steps=150, epochs=6, learning_rate=0.03, rounds=3, trainable="classifier")
"""Only the classifier is trained: a network that is trained as a whole on a few hundred images memorises wrong
labels, and takes twice as long (set `compare` of benchmarks/results/audits.jsonl)."""
FROM_SCRATCH = Schedule(steps=800, epochs=20, learning_rate=0.05, rounds=2, trainable="all")


def choose_batch(samples: int) -> int:
    """Return the batch size: the largest that leaves a fold of half the samples enough steps in an epoch."""
    fitting = [batch for batch, least in _STEPS_PER_EPOCH.items() if samples // 2 >= batch * least]
    return min(fitting[-1], max(samples, 1))


def choose_epochs(samples: int, batch: int, schedule: Schedule) -> int:
    """Return the epochs that give a fold of half the samples the schedule's minimum of steps and of epochs."""
    steps_per_epoch = max(1, math.ceil(samples / 2 / batch))
    return max(schedule.epochs, math.ceil(schedule.steps / steps_per_epoch))


def choose_recipe(
    data: dict[str, Any], samples: int, start: Start, device: str, workers: int, train: bool = False
) -> dict[str, Any]:
    """Return the content of the recipe.

    Args:
        data: the section `data.train`.
        device: `cpu` or `cuda`.
        train: whether networks are trained in spite of initial weights.
    """
    schedule = FROM_WEIGHTS if start.has_weights else FROM_SCRATCH
    batch = choose_batch(samples)
    epochs = choose_epochs(samples, batch, schedule)
    incv: dict[str, Any] = {
        "rounds": schedule.rounds,
        "epochs": epochs,
        "init": "fresh",
        "noise_estimate": "confident",
        "remove_ratio": 0.0,
        "optimizer": choose_optimizer(epochs, schedule.learning_rate),
    }
    if (start.has_weights or start.model == NO_NETWORK) and not train:
        folds = min(FOLDS, samples)
        incv = {"judge": "features", "rounds": 1, "folds": folds, "noise_estimate": "combined", "remove_ratio": 0.0}
    image = {"size": _SCRATCH_SIZE[device]} | start.image
    resize = math.ceil(image["size"] * _MARGIN)
    model: dict[str, Any] = {"name": start.model}
    if start.options:
        model["options"] = dict(start.options)
    if incv.get("judge") is None:
        model["trainable"] = schedule.trainable
    if start.pretrained:
        model["pretrained"] = True
    if start.weights is not None:
        model["weights"] = start.weights
    return {
        "seed": 0,
        "data": {"train": data | {"resize": resize}},
        "labels": {"noise": "none"},
        "image": image | {"resize": resize, "flip": True},
        "model": model,
        "batch": {"global": batch},
        "precision": "bf16" if device == "cuda" else "fp32",
        "methods": [],
        "incv": incv,
        "execution": {"workers": workers},
    }


def choose_optimizer(epochs: int, rate: float) -> dict[str, Any]:
    """Return SGD with a short warm-up, and two drops of the learning rate towards the end."""
    drops = sorted({max(1, round(epochs * 0.6)): rate / 5, max(2, round(epochs * 0.85)): rate / 25}.items())
    return {
        "kind": "sgd",
        "learning_rate": rate,
        "warmup_epochs": round(min(1.0, epochs / 10), 3),
        "milestones": [[epoch, round(value, 8)] for epoch, value in drops],
        "weight_decay": 0.0005,
    }
