"""How suspicious a given label is, beside the likeliest other class."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.distributed.world import World

_CONFUSION = 2.0
"""How much it counts that people confuse a class; chosen with SUSPICIOUS (benchmarks/results/label_issues.jsonl)."""


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
