"""Held-out predictions from features: a logistic regression in each fold, times a vote of the nearest neighbours.

The network that gives the features stays as it is, so one pass over the images serves all folds.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.distributed.world import World
from trainer.incv.logistic import Fit, Validated, fit_temperature, scale_rows
from trainer.incv.predictions import OUTPUTS, Predictions, gather_predictions, merge_predictions
from trainer.incv.suspicion import as_loss, measure_suspicion, usual_probabilities
from trainer.loading.sample_order import Ids, mix64
from trainer.passes import Status
from trainer.passes.outputs import OUTPUTS as COLUMNS
from trainer.passes.outputs import NetworkRows, compute_columns
from trainer.passes.table import SampleTable, gather_table

NEIGHBOURS = 30
FOLDS = 5
_PRIOR_VOTES = 1.0
"""Votes that are spread over all classes, so that no class has the probability 0."""
_LARGEST_TRIAL = 20_000
"""Rows of all ranks on which penalties are compared, or 100 for each class if that is more."""
_FEW_ROWS = 20_000
"""Rows up to which rank 0 fits alone, in seconds. Sums over more ranks round differently, and where a fit stops
depends on that: probabilities would differ by up to 0.01."""
_CHUNK_NUMBERS = 2**25
"""Numbers of a chunk's scores: bounds the memory."""
_MOST_KEPT = 10**8
"""Probabilities of all samples and classes up to which they are kept."""
_PASSES = 50
_SMALLEST = 1e-12
"""Probability below which given predictions are all alike."""


@dataclass(frozen=True, eq=False)
class Examined:
    """The samples of a run that have features; every rank holds all of it."""

    ids: Ids
    """Ascending."""
    features: torch.Tensor
    """float16 or float32 [samples, features], on the CPU."""
    neighbours: npt.NDArray[np.int32]
    """int32 [samples, k]: rows of the most similar other samples."""
    groups: npt.NDArray[np.int64]
    """Duplicates have the same number."""
    probabilities: npt.NDArray[np.float32] | None = None
    """Held-out probabilities from elsewhere, which judge in place of the features: [samples, classes]."""


@dataclass(frozen=True, eq=False)
class JudgedSamples:
    """The samples to judge, with their labels; arrays [samples]."""

    examined: Examined
    labels: npt.NDArray[np.int64]
    """The given labels."""
    folds: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    """Whether a sample may teach others; those that the run holds out may not."""

    @property
    def ids(self) -> Ids:
        return self.examined.ids


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the judge returns on every rank."""

    predictions: Predictions
    probabilities: npt.NDArray[np.float32] | None
    """Calibrated, [samples, classes]; None if they are too many to keep."""
    facts: dict[str, Any]
    """About the fit, for `incv.json`."""


def judge_samples(samples: JudgedSamples, classes: int, world: World, top_k: int = 1) -> Verdict:
    """Predict each sample by what others teach; a collective, in which the ranks share the rows, if there are many.

    `given_probability` and the like are calibrated to the given labels. `loss` is the label's suspicion as a loss.
    """
    count, device = len(samples.ids), world.device
    share = _fit_share(count, world)
    trial = _Trial(samples, share, world)
    scorer: _Scorer
    if samples.examined.probabilities is None:
        scorer, facts = _fit_regression(samples, share, classes, world, trial)
    else:
        scorer, facts = _GivenScorer(samples, share, samples.examined.probabilities, device), {}
    scores = scorer.scores(trial.own)
    every, taught = trial.gather(scores), trial.labels
    facts |= {
        "temperature": _agree(world, fit_temperature(every, taught)),
        "uniform_flips": _agree(world, uniform_flips(every, taught)),
    }
    factor = facts["temperature"]
    usual = usual_probabilities((scores * factor).log_softmax(dim=1), scorer.labels[trial.own], world)
    calibration = _Calibration(factor, usual)
    kept = count * classes <= _MOST_KEPT
    predictions, probabilities = _predict(scorer, samples, share, calibration, top_k, kept)
    if world.rank_group is None:
        gathered = merge_predictions(predictions, samples.ids)
    else:
        gathered = gather_predictions(world, predictions, samples.ids)
    if not kept:
        return Verdict(gathered, None, facts)
    own = torch.from_numpy(samples.ids[share]).to(device)
    table = gather_table(world, own, {"probabilities": probabilities}, samples.ids, "the probabilities")
    return Verdict(gathered, table["probabilities"].cpu().numpy(), facts)


def _fit_regression(
    samples: JudgedSamples, share: slice, classes: int, world: World, trial: "_Trial"
) -> tuple["_FeatureScorer", dict[str, Any]]:
    """Fit the regressions of all folds; return them with facts about the fit."""
    device, number, count = world.device, int(samples.folds.max()) + 1, len(samples.ids)
    rows = samples.examined.features[share].to(device)
    total = world.all_reduce(rows.sum(dim=0, dtype=torch.float64))
    fit = Fit(
        scale_rows(rows, (total / count).float()),
        torch.from_numpy(samples.labels[share]).to(device),
        classes,
        world,
    )
    folds = torch.from_numpy(samples.folds[share]).to(device)
    counts = torch.from_numpy(samples.trained[share]).to(device).float()
    validated = _validate(fit, folds, counts, number, samples.ids[share], count)
    scorer = _FeatureScorer(fit, validated, folds, samples, share)
    held_out = trial.gather(scorer.held_out(trial.own))
    scorer.temperature = _agree(world, fit_temperature(held_out, trial.labels))
    return scorer, {
        "penalty": validated.penalty,
        "agreement_of_regression": validated.agreement,
        "converged": all(one.converged for one in validated.classifiers),
    }


def rank_share(count: int, world: World) -> slice:
    """Return the rows, of `count`, that this rank works on."""
    first, last = (count * rank // world.size for rank in (world.rank, world.rank + 1))
    return slice(first, last)


def _fit_share(count: int, world: World) -> slice:
    """Return the rows on which this rank fits and which it predicts."""
    if count > _FEW_ROWS:
        return rank_share(count, world)
    return slice(0, count if world.rank == 0 else 0)


def _sample_rows(ids: Ids, most: int, count: int) -> torch.Tensor:
    """Return which rows are among about `most` of the `count` of all ranks, the same at every start: int64."""
    chosen = (mix64(ids).astype(np.float64) / 2.0**64 < most / count) | (count <= most)
    return torch.from_numpy(np.flatnonzero(chosen))


class _Trial:
    """The rows on which predictions are calibrated: all, or some of many. A rank holds those of some classes alone,
    so every rank calibrates on the rows of all ranks."""

    def __init__(self, samples: JudgedSamples, share: slice, world: World) -> None:
        count = len(samples.ids)
        self._world, self._rows = world, _sample_rows(samples.ids, _LARGEST_TRIAL, count)
        own = self._rows[(self._rows >= share.start) & (self._rows < share.stop)]
        self._own = own.to(world.device)
        self.own = self._own - share.start
        """Which of this rank's rows are among them: int64."""
        self.labels = torch.from_numpy(samples.labels)[self._rows].to(world.device)
        """The given ones, of the rows of all ranks."""

    def gather(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of the rows of all ranks; a collective. scores: of this rank's rows, [rows, classes]."""
        table = gather_table(self._world, self._own, {"scores": scores}, self._rows.numpy(), "the scores")
        return table["scores"]


def _validate(fit: Fit, folds: torch.Tensor, counts: torch.Tensor, number: int, ids: Ids, count: int) -> Validated:
    """Choose the penalty, on a part of many samples, and fit the classifiers of all folds.

    ids: of this rank; count: of all ranks.
    """
    most = max(_LARGEST_TRIAL, 100 * fit.classes)
    part = _sample_rows(ids, most, count).to(counts.device)
    trial = Fit(fit.features[part], fit.labels[part], fit.classes, fit.world)
    chosen = trial.cross_validate(folds[part], counts[part], number)
    if count <= most:
        return chosen
    starts = enumerate(chosen.classifiers)
    each = [fit.train(counts * (folds != fold), chosen.penalty, start) for fold, start in starts]
    return Validated(chosen.penalty, chosen.agreement, each)


class _Scorer(Protocol):
    """Gives the scores of some of this rank's rows at a time."""

    labels: torch.Tensor
    """The given ones of this rank's rows, int64 [rows]."""
    classes: int

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of each class's probability, up to a constant: float32 [rows, classes]."""


class _GivenScorer:
    """The logarithm of probabilities that were computed elsewhere."""

    def __init__(
        self, samples: JudgedSamples, share: slice, probabilities: npt.NDArray[np.float32], device: torch.device
    ) -> None:
        self.labels = torch.from_numpy(samples.labels[share]).to(device)
        self.classes = probabilities.shape[1]
        self._log_p = torch.from_numpy(probabilities[share]).clamp_min(_SMALLEST).log().to(device)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        return self._log_p[rows]


class _FeatureScorer:
    """Computes the logarithm of both predictions' product."""

    def __init__(
        self, fit: Fit, validated: Validated, folds: torch.Tensor, samples: JudgedSamples, share: slice
    ) -> None:
        self.fit, self.samples, self.share = fit, samples, share
        self.labels, self.classes = fit.labels, fit.classes
        self.temperature = 1.0
        """Of the regression."""
        self._validated, self._folds = validated, folds
        device = folds.device
        self._neighbours = torch.from_numpy(samples.examined.neighbours[share]).to(device)
        self._groups = torch.from_numpy(samples.examined.groups).to(device)
        self._labels = torch.from_numpy(samples.labels).to(device)
        self._trained = torch.from_numpy(samples.trained).to(device)

    def held_out(self, rows: torch.Tensor) -> torch.Tensor:
        return self._validated.held_out_logits(self.fit.features[rows], self._folds[rows])

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of some of this rank's rows: float32 [rows, classes]."""
        return (self.held_out(rows) * self.temperature).log_softmax(dim=1) + self._votes(rows).log()

    def _votes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the share of the neighbours with each label: float32 [rows, classes]."""
        classes, near = self.fit.classes, self._neighbours[rows].long()
        own = self._groups[self.share.start : self.share.stop][rows]
        counted = self._trained[near] & (self._groups[near] != own[:, None])
        votes = torch.full((len(rows), classes), _PRIOR_VOTES / classes, device=near.device)
        votes.scatter_add_(1, self._labels[near], counted.float())
        return votes / votes.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class _Calibration:
    factor: float
    """Of the scores."""
    usual: torch.Tensor
    """As `usual_probabilities` returns it."""


def _predict(
    scorer: _Scorer, samples: JudgedSamples, share: slice, calibration: "_Calibration", top_k: int, kept: bool
) -> tuple[list[Predictions], torch.Tensor]:
    """Return the predictions of this rank's rows, in pieces, and their probabilities if they are kept."""
    outputs = [COLUMNS[name] for name in OUTPUTS]
    classes = scorer.classes
    pieces, probabilities = [], [torch.empty(0, classes, device=scorer.labels.device)]
    every = torch.arange(share.stop - share.start, device=scorer.labels.device)
    for rows in every.split(max(1, _CHUNK_NUMBERS // classes)):
        if not len(rows):  # more ranks than samples
            continue
        scores, given = (scorer.scores(rows) * calibration.factor).log_softmax(dim=1), scorer.labels[rows]
        readable = torch.ones(len(rows), dtype=torch.bool, device=scores.device)
        columns = compute_columns([NetworkRows(scores, None, given, top_k)], readable, outputs, True)
        columns["losses"] = as_loss(measure_suspicion(scores, given, calibration.usual))
        here = slice(share.start + int(rows[0]), share.start + int(rows[-1]) + 1)
        piece = Predictions.of_table(SampleTable(torch.from_numpy(samples.ids[here]), columns), 0)
        pieces.append(piece.with_folds(samples.folds[here].astype(np.int8)))
        if kept:
            probabilities.append(scores.exp())
    return pieces, torch.cat(probabilities)


def _agree(world: World, value: float) -> float:
    """Return the mean over ranks, the same on all."""
    return float(world.all_reduce_mean([torch.tensor(value, dtype=torch.float64, device=world.device)])[0])


@dataclass(frozen=True)
class Flips:
    """How given labels follow from scores."""

    factor: float
    """Of the scores, that makes them the logarithms of calibrated probabilities of the labels before the flips."""
    share: float
    """Of labels that are flipped to another class at random."""


def uniform_flips(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of labels that are flipped to another class at random, by `fit_flips`."""
    return fit_flips(scores, labels).share


def fit_flips(scores: torch.Tensor, labels: torch.Tensor) -> Flips:
    """Fit how many labels are flipped to another class at random, as the held-out scores show it.

    The given label is that of a prediction softmax(s * scores) with probability 1 - e, and any other class with
    probability e; s and e are those that make the given labels likeliest. Labels that people confuse are explained by
    soft predictions, and are not counted.

    Args:
        scores: float [rows, classes], logarithms of held-out predictions.
        labels: the given ones, int64 [rows].
    """
    if not len(labels):
        return Flips(1.0, 0.0)
    classes = scores.shape[1]
    wide = scores.double()
    free = torch.tensor([0.0, -2.0], dtype=torch.float64, device=scores.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=_PASSES, line_search_fn="strong_wolfe")

    def measure() -> torch.Tensor:
        optimizer.zero_grad()
        log_p = (wide * free[0].clamp(-4, 4).exp()).log_softmax(dim=1).gather(1, labels[:, None])[:, 0]
        p, share = log_p.exp(), free[1].sigmoid()
        loss = -((1 - share) * p + share * (1 - p) / (classes - 1)).clamp_min(1e-300).log().mean()
        loss.backward()
        return loss

    optimizer.step(measure)
    factor, share = float(free[0].detach().clamp(-4, 4).exp()), float(free[1].detach().sigmoid())
    return Flips(factor, share) if math.isfinite(factor) and math.isfinite(share) else Flips(1.0, 0.0)


def without_features(ids: Ids) -> Predictions:
    """Return the rows of samples that have no features, which are neither selected nor removed."""
    nothing, none = np.full(len(ids), np.nan, np.float32), np.full(len(ids), -1, np.int32)
    return Predictions(
        sample_id=ids,
        fold=np.zeros(len(ids), np.int8),
        predicted=none,
        agrees=np.zeros(len(ids), np.bool_),
        loss=nothing,
        given_probability=nothing,
        predicted_probability=nothing,
        second=none,
        second_probability=nothing,
        given_rank=none,
        status=np.full(len(ids), int(Status.UNREADABLE), np.int8),
    )
