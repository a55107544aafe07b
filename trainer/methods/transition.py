"""Estimate the noise transition matrix T from the predictions of a network trained on the noisy labels.

As in forward correction (Patrini et al. 2017): row i of T is the prediction for an anchor of class i, a training
sample that the network assigns to class i with near certainty.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shards.errors import DataError
from trainer.loading.sample_order import Ids
from trainer.passes.table import SampleTable

Floats = npt.NDArray[np.float32]
_BLOCK = 2**24
"""Probabilities whose anchors are found at a time (64 MiB)."""


@dataclass(frozen=True)
class Transition:
    """An estimate of T and where it comes from."""

    matrix: npt.NDArray[np.float64]
    """T_ij = P(given label = j | true label = i): [classes, classes]; rows sum to 1."""
    anchors: Ids
    """The sample_id of each class's anchor: [classes]."""


def choose_anchors(probabilities: Floats, percentile: float) -> npt.NDArray[np.int64]:
    """Return the position of each class's anchor: the largest probability below the percentile: [classes].

    probabilities: of each class for each sample, [classes, samples]. The percentile of n values is the one at
    ceil(percentile / 100 * (n - 1)) of the sorted ones. Of equal values the first counts. If no value is below, all
    values up to the percentile are equal, and the first of these is the anchor.
    """
    position = math.ceil(percentile * (probabilities.shape[1] - 1) / 100)
    limits = np.partition(probabilities, position, axis=1)[:, position, None]
    # A copy: the column of one class must not change the predictions of the anchors.
    below = np.where(probabilities < limits, probabilities, np.float32(-1))
    anchors = below.argmax(axis=1)
    none_below = below[np.arange(len(below)), anchors] < 0
    anchors[none_below] = (probabilities[none_below] == limits[none_below]).argmax(axis=1)
    return anchors


def normalise_rows(matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Divide each row by its sum, in float64."""
    rows = matrix.astype(np.float64)
    return rows / rows.sum(axis=1, keepdims=True)


def estimate_transition(table: SampleTable, percentile: float) -> Transition:
    """Estimate T from the `probabilities` [rows, classes] of all training samples whose prediction is usable.

    The anchors are found for a block of classes at a time, in host memory.
    """
    if not len(table):
        raise DataError(
            "no training sample has a usable prediction, from which to estimate the transition matrix: check the "
            "images with `incv shards verify`, and whether the training that predicts has diverged"
        )
    probabilities = table["probabilities"]
    block = max(1, _BLOCK // len(table))
    blocks = (part.T.contiguous().cpu().numpy() for part in probabilities.split(block, dim=1))
    anchors = np.concatenate([choose_anchors(part, percentile) for part in blocks])
    rows = torch.from_numpy(anchors).to(probabilities.device)
    return Transition(normalise_rows(probabilities[rows].cpu().numpy()), table.ids[rows].cpu().numpy())
