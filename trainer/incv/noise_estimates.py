"""Estimate the noise in three ways from the same held-out predictions, and apply the rules that depend on it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer import theory
from trainer.config.schema import IncvConfig
from trainer.incv.confidence_curve import estimate_from_confidence
from trainer.incv.confident import are_doubted, confident_joint
from trainer.incv.measure import confusion_counts
from trainer.incv.predictions import Predictions

_MOST_REMOVED = 2.0  # r = min(2, ε / (1 - ε)), released code
_HIGH_NOISE, _MEDIUM_NOISE = 0.6, 0.3  # thresholds of the released code's rules
_COUNTED_TWICE = 0.2  # part of the random flips by which the confident estimate is too high; label_issues.jsonl
_MOST_CLASSES_KEPT = 100  # a larger matrix does not belong in incv.json
_SINGULAR = 1e-6
"""Directions of T in which it shrinks more than this tell nothing of the true class."""
_CONTRADICTION = 0.05
"""How far beyond 0 or 1 a share may be because T is an estimate."""


@dataclass(frozen=True)
class NoiseEstimates:
    paper: float
    """ε from the agreement, by Eq. 4: exact for a network that memorises, too low for one that generalises."""
    confident: float
    """ε from counts of given versus confidently predicted labels; does not assume memorisation."""
    confidence_curve: float
    """ε as the disagreement that predictions of growing confidence tend to; does not assume memorisation
    either."""
    confident_of_selected: float
    """ε_S = 1 - LP by Prop. 2, with the confident estimates of T and of the class prior."""
    held_out_of_selected: float
    """ε_S by Prop. 2, with the confusion matrix of the held-out predictions and the confidence curve's T, at most
    that of a network that memorises."""
    prior: npt.NDArray[np.float64]
    """The confident estimate of the class prior."""
    transition: npt.NDArray[np.float64] | None
    """The confident estimate of T, [true, given]; None if there are more than 100 classes."""
    uniform_flips: float | None = None
    """Share of labels that are flipped at random to any other class; only a judge by features measures it."""
    doubted: float | None = None
    """Share of labels that its predictions doubt."""

    @property
    def combined(self) -> float | None:
        """ε from both kinds of noise; None without a measure of the random flips."""
        if self.uniform_flips is None or self.doubted is None:
            return None
        return combine_estimates(self.confident, self.uniform_flips, self.doubted)

    def of_rule(self, config: IncvConfig) -> float:
        value: float | None = getattr(self, config.noise_estimate)
        return self.confident if value is None else value

    def as_json(self) -> dict[str, Any]:
        return {
            "paper": self.paper,
            "confident": self.confident,
            "confidence_curve": self.confidence_curve,
            "confident_of_selected": self.confident_of_selected,
            "held_out_of_selected": self.held_out_of_selected,
            "prior": self.prior.tolist(),
            "transition": None if self.transition is None else self.transition.tolist(),
            "uniform_flips": self.uniform_flips,
            "doubted": self.doubted,
            "combined": self.combined,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "NoiseEstimates":
        transition = content["transition"]
        return cls(
            paper=content["paper"],
            confident=content["confident"],
            confidence_curve=content["confidence_curve"],
            confident_of_selected=content["confident_of_selected"],
            held_out_of_selected=content["held_out_of_selected"],
            prior=np.asarray(content["prior"]),
            transition=None if transition is None else np.asarray(transition),
            uniform_flips=content.get("uniform_flips"),
            doubted=content.get("doubted"),
        )


def combine_estimates(confident: float, uniform_flips: float, doubted: float) -> float:
    """Return ε from three measures, each of which errs where another does not.

    The confident estimate is close where people confuse classes. Where labels are flipped at random, which
    `uniform_flips` tells, it counts mistakes of the predictions too; where predictions are sharp it is too low, and
    the share of doubted labels is close. ε is the mean of these two, and at least the random flips.
    """
    return max(uniform_flips, (confident - _COUNTED_TWICE * uniform_flips + doubted) / 2)


def estimate_noise(
    predictions: Predictions,
    given: npt.NDArray[np.int64],
    classes: int,
    config: IncvConfig,
    uniform_flips: float | None = None,
) -> NoiseEstimates:
    """Compute the noise estimates from the predictions of the first round.

    Args:
        given: the given label of each predicted sample, int64 [rows].
        uniform_flips: as the judge by features measures it.
    """
    # Algorithm 2, line 8: the paper estimates ε from the first half alone. Of more folds, one is a small part.
    agreement = (predictions.of_fold(0) if config.folds == 2 else predictions).agreement()
    # The released code uses Eq. 4 for asymmetric noise too; only ε_S differs.
    paper = theory.noise_from_accuracy(agreement, classes, "symmetric", config.agree_top_k)
    usable = predictions.usable()
    joint = confident_joint(
        given[usable],
        predictions.predicted[usable],
        predictions.given_probability[usable],
        predictions.predicted_probability[usable],
        classes,
    )
    prior = joint.sum(axis=0)
    transition = np.where(prior > 0, joint / np.where(prior > 0, prior, 1.0), np.eye(classes)).T
    curve = estimate_from_confidence(predictions, given, classes)
    return NoiseEstimates(
        paper=float(paper),
        confident=float(1.0 - np.trace(joint)),
        confidence_curve=curve.noise,
        confident_of_selected=float(1.0 - theory.label_precision(transition, prior)),
        held_out_of_selected=_held_out_of_selected(
            given[usable], predictions.predicted[usable], curve.transition, config.noise_kind
        ),
        prior=prior,
        transition=transition if classes <= _MOST_CLASSES_KEPT else None,
        uniform_flips=uniform_flips,
        doubted=None if uniform_flips is None else _share_doubted(predictions.rows(usable)),
    )


def _share_doubted(predictions: Predictions) -> float:
    doubted = are_doubted(predictions.loss, predictions.agrees)
    return float(doubted.mean()) if len(doubted) else 0.0


def _held_out_of_selected(
    given: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.integer],
    transition: npt.NDArray[np.float64],
    kind: theory.NoiseKind,
) -> float:
    """ε_S as the predictions show it. If T is badly estimated, only the agreement limits it. All rows are usable."""
    agreement = float((given == predicted).mean()) if len(given) else 0.0
    most = theory.most_noise_of_selected(agreement, len(transition), kind)
    measured = noise_of_agreeing(given, predicted, transition)
    return most if measured is None else min(measured, most)


def remove_ratio(config: IncvConfig, noise: float) -> float:
    """Return r, the number of samples removed per selected sample. noise: ε."""
    if config.remove_ratio != "from_noise":
        return config.remove_ratio
    if config.noise_kind == "asymmetric":
        return 0.0
    return _MOST_REMOVED if noise >= 1.0 else min(_MOST_REMOVED, noise / (1.0 - noise))


def uses_best_epoch(config: IncvConfig, round_: int, noise: float | None) -> bool:
    """Whether this round predicts with the network of the epoch with the best held-out agreement, not the last epoch.

    round_ counts from 0. noise: ε; None in round 0, where the released rule does not depend on it.
    """
    if config.round_network != "released_rule":
        return config.round_network == "best"
    if noise is None:
        return True
    if config.noise_kind == "asymmetric" or noise > _HIGH_NOISE:
        return round_ < 1
    return round_ < (2 if noise > _MEDIUM_NOISE else 4)


def noise_of_agreeing(
    given: npt.NDArray[np.integer], predicted: npt.NDArray[np.integer], transition: npt.NDArray[np.float64]
) -> float | None:
    """Estimate ε_S = 1 - LP as Prop. 2 does, with the network's own confusion matrix M instead of M = T.

    A held-out prediction depends on the given label only through the true class i, so the counts of given label j and
    predicted class k are Σ_i T_ij P(i, k). Solved for P(i, k), they tell how often a prediction is right, and with T
    how often the label is right where both agree. given, predicted: [rows]; transition: T, [true, given].
    Returns 0 if no prediction agrees, and None if T contradicts the predictions: if more than all of the labels that
    agree, or fewer than none, would have to be right. That happens where T is nearly singular, at very high noise.
    """
    joint = confusion_counts(given, predicted, len(transition)).astype(np.float64)
    agreeing = float(np.trace(joint))
    if agreeing == 0.0:
        return 0.0
    by_true_class = np.linalg.lstsq(transition.T, joint, rcond=_SINGULAR)[0]
    right = float(np.diag(transition) @ np.diag(by_true_class))
    wrong = 1.0 - right / agreeing
    return float(np.clip(wrong, 0.0, 1.0)) if -_CONTRADICTION <= wrong <= 1.0 + _CONTRADICTION else None
