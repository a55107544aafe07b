"""The work of a recipe: every training and every predict pass, with its rows; nothing here knows of GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer import theory
from trainer.acceleration.policy import should_compile
from trainer.config.schema import IncvConfig, Recipe
from trainer.estimate.figures import AGREEMENT
from trainer.incv.noise_estimates import remove_ratio, uses_best_epoch
from trainer.loading.sample_order import candidate_rows
from trainer.methods.method import ExpectedSizes, Method
from trainer.methods.registry import methods_of


@dataclass(frozen=True)
class Samples:
    """How many there are."""

    train: int
    classes: int
    eval: Mapping[str, int]
    """Of each evaluation set."""
    agreement: float = AGREEMENT
    """Share of the held-out labels that a round's networks agree with: S and C of later rounds follow from it."""


@dataclass(frozen=True)
class Training:
    """Steps of equal shape."""

    stage: str
    networks: int
    steps: int
    rows: int
    """Of S in a step, over all GPUs."""
    candidate_rows: int = 0
    ranks_first: bool = False
    """Whether both networks see all rows in eval mode before they train."""
    folds: int = 1
    """2: one for each fold, side by side or in turn."""
    compiled: bool = False


@dataclass(frozen=True)
class Predicting:
    """Forward passes over the same samples."""

    stage: str
    networks: int
    samples: int
    passes: int
    gathers: bool = False
    """Whether every rank gets every prediction afterwards."""
    folds: int = 1
    compiled: bool = False
    """Whether the networks come from a compiled training; long passes then are compiled too."""


Work = Training | Predicting


@dataclass(frozen=True)
class Round:
    selected: int
    """|S| before the round."""
    candidates: int
    best: bool
    """Whether every epoch predicts the held-out half, to find the one that agrees best."""


def rounds_of(incv: IncvConfig, samples: Samples) -> tuple[list[Round], int, int]:
    """The rounds with their sizes, then |S| and |C| after the last, if every round agrees as assumed."""
    noise = assumed_noise(incv, samples)
    ratio = remove_ratio(incv, noise)
    rounds, selected, candidates = [], 0, samples.train
    for number in range(incv.rounds):
        if candidates < 2:  # as INCV itself ends
            break
        rounds.append(Round(selected, candidates, uses_best_epoch(incv, number, noise if number else None)))
        agreeing = round(samples.agreement * candidates)
        removed = min(int(ratio * agreeing), candidates - agreeing)
        selected, candidates = selected + agreeing, candidates - agreeing - removed
    return rounds, selected, candidates


def assumed_noise(incv: IncvConfig, samples: Samples) -> float:
    """ε that the assumed agreement would be read as."""
    return theory.noise_from_accuracy(samples.agreement, max(samples.classes, 2), incv.noise_kind)


def work_of(recipe: Recipe, samples: Samples) -> list[Work]:
    """In the order of the stages. Nothing is forgotten or unreadable: n(e) is |B_S|.

    Evaluation loads its networks, and what is loaded is not compiled.
    """
    work: list[Work] = []
    if recipe.incv is not None:
        work += _incv(recipe, recipe.incv, samples)
    for method in methods_of(recipe):
        work += _method(recipe, method, samples)
    for method in methods_of(recipe):
        work += [Predicting("evaluate", method.networks, count, passes=1) for count in samples.eval.values()]
    return work


def _training(
    recipe: Recipe,
    stage: str,
    selected: int,
    epochs: int,
    candidates: int = 0,
    ranks_first: bool = False,
    of_epochs: int | None = None,
    networks: int = 1,
) -> Training:
    """of_epochs: those of the whole training, where this is a part of it."""
    batch = recipe.batch.global_
    steps_per_epoch = -(-selected // batch)
    return Training(
        stage,
        networks=networks,
        steps=steps_per_epoch * epochs,
        rows=batch,
        candidate_rows=candidate_rows(batch, selected, candidates),
        ranks_first=ranks_first,
        folds=2 if stage == "incv" else 1,
        compiled=should_compile(recipe.execution, steps_per_epoch * (of_epochs or epochs)),
    )


def _incv(recipe: Recipe, incv: IncvConfig, samples: Samples) -> Iterator[Work]:
    for one in rounds_of(incv, samples)[0]:
        half = -(-one.candidates // 2)
        training = _training(recipe, "incv", one.selected + half, incv.epochs)
        yield training
        passes = 1 + (incv.epochs if one.best else 0)
        yield Predicting("incv", 1, half, passes, gathers=True, folds=2, compiled=training.compiled)


def _method(recipe: Recipe, method: Method, samples: Samples) -> Iterator[Work]:
    noise, selected, candidates = 0.0, samples.train, 0
    if recipe.incv is not None:
        noise = assumed_noise(recipe.incv, samples)
        _, selected, candidates = rounds_of(recipe.incv, samples)
    sizes = ExpectedSizes(samples.train, selected, candidates, noise, recipe.incv)
    passes = method.passes(method.config(recipe), sizes)
    total = sum(epochs.count for epochs in passes)
    for epochs in passes:
        yield _training(
            recipe,
            method.name,
            epochs.selected,
            epochs.count,
            epochs.candidates,
            epochs.ranks_first,
            of_epochs=total,
            networks=method.networks,
        )
