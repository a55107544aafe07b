"""Local intrinsic dimensionality (LID) of features, and how D2L decides by it: pure functions.

LID and the rules are those of D2L (Ma et al. 2018, "Dimensionality-Driven Learning with Noisy Labels").
"""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import numpy as np
import torch

from trainer.loading.sample_order import Ids, epoch_order

_DEVIATIONS = 2


def draw_batches(stream: int, epoch: int, samples: Ids, rows: int, batches: int) -> list[Ids]:
    """Draw the samples whose features are measured after an epoch, in batches of `rows`; the same at any world size.

    If there are fewer samples, there are fewer batches, or one smaller one.
    """
    drawn = epoch_order(stream, epoch, samples)[: rows * batches]
    whole = len(drawn) // rows * rows
    return [drawn[first : first + rows] for first in range(0, whole, rows)] or [drawn]


def estimate_lid(features: torch.Tensor, neighbours: int) -> float | None:
    """Return the mean LID of a batch: float [rows, width]; None if it has no two rows with different features.

    The maximum-likelihood estimate of a row is -k / sum(log(r_i / r_k)), with its k smallest distances r_i to other
    rows. Rows at distance 0 are no neighbours. A row whose neighbours are all equally far has no estimate.
    """
    points = features.double()
    if len(points) < 2:
        return None
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # exact for equal rows
    distances = torch.where(distances > 0, distances, torch.inf)
    nearest = distances.topk(min(neighbours, len(points)), dim=1, largest=False).values
    counted = torch.isfinite(nearest)
    furthest = torch.where(counted, nearest, 0.0).amax(dim=1, keepdim=True)
    logs = torch.where(counted, nearest.log() - furthest.log(), 0.0).sum(dim=1)
    usable = logs < 0
    if not usable.any():
        return None
    return float((-counted.sum(dim=1)[usable] / logs[usable]).mean())


def mean_lid(features: torch.Tensor, ids: Ids, batches: Sequence[Ids], neighbours: int) -> float | None:
    """Return the mean over the batches of their LID; None if no batch has an estimate.

    features: of the samples `ids`, ascending: [len(ids), width]; samples of a batch that are not among them, since
    they could not be read, are left out.
    """
    lids = []
    for batch in batches:
        places = np.searchsorted(ids, np.intersect1d(batch, ids))
        lids.append(estimate_lid(features[torch.from_numpy(places)], neighbours))
    known = [lid for lid in lids if lid is not None]
    return fmean(known) if known else None


def is_turning_point(history: Sequence[float], epochs: int, initial: int, window: int) -> bool:
    """Whether the LID after the last of `epochs` finished epochs exceeds mean + 2 std of the `window` before it.

    history: LIDs, the newest last. All of the window must come after the `initial` epochs.
    """
    if epochs < initial + window or len(history) <= window:
        return False
    before = history[-window - 1 : -1]
    return history[-1] > fmean(before) + _DEVIATIONS * pstdev(before)


def label_share(history: Sequence[float], epochs: int, total: int) -> float:
    """Return α = exp(-(e / E) LID_e / min LID): the share of the given label in the targets of the next epoch.

    history: LIDs, the newest last; epochs: e, the finished ones, of `total`: E.
    """
    return math.exp(-(epochs / total) * history[-1] / min(history))
