"""How suspicious a given label is, beside the likeliest other class."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.distributed.world import World

LIMIT = 1.0
"""Suspicion above which a label that the prediction contradicts is doubted: mistakes of the predictions are mostly
closer calls."""
_CONFUSION = 2.0
"""How much it counts that people confuse a class; chosen with LIMIT (benchmarks/results/label_issues.jsonl)."""


def usual_probabilities(log_p: Tensor, labels: Tensor, world: World) -> Tensor:
    """Return, for each class, the mean probability of the given label over the samples of all ranks that have it.

    It is low for a class that people confuse with another. Of a class with few samples, it tends to the mean of all.

    Args:
        log_p: logarithms of calibrated probabilities, [rows, classes], of this rank.
        labels: the given ones, int64 [rows].
    """
    given = log_p.gather(1, labels[:, None])[:, 0].exp().double()
    sums = torch.zeros(2, log_p.shape[1], dtype=torch.float64, device=log_p.device)
    sums[0].scatter_add_(0, labels, given)
    sums[1].scatter_add_(0, labels, torch.ones_like(given))
    total, count = world.all_reduce(sums)
    mean = total.sum() / count.sum().clamp_min(1)
    return ((total + mean) / (count + 1)).to(log_p.dtype)


def measure_suspicion(log_p: Tensor, labels: Tensor, usual: Tensor) -> Tensor:
    """Return the logarithm of the odds of the likeliest other class against the given label: [rows].

    Each is measured by the square of what is usual for its class. So a cat called a dog is suspicious although the
    prediction is not sure, where many cats are called dogs.

    Args:
        log_p: logarithms of calibrated probabilities, [rows, classes].
        labels: the given ones, int64 [rows].
        usual: as `usual_probabilities` returns it.
    """
    relative = log_p - _CONFUSION * usual.log()
    given = relative.gather(1, labels[:, None])
    others = relative.scatter(1, labels[:, None], -math.inf)
    return others.amax(dim=1) - given[:, 0]


def as_loss(suspicion: Tensor) -> Tensor:
    """Return -log of the share of the given label in these odds, a loss that grows with the suspicion."""
    return F.softplus(suspicion)


def are_doubted(loss: npt.NDArray[np.floating[Any]], agrees: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which labels are doubted, by `as_loss`, that predictions contradict as well: bool [rows]."""
    return np.asarray((loss > math.log1p(math.exp(LIMIT))) & ~agrees)
