"""Images that belong to no class of the data set: far from the middle of their own class and of every other."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.examine.neighbours import unit_rows
from trainer.examine.outliers import robust_limit

_DEVIATIONS = 3.5
"""For `robust_limit`. With 4, noise among images as small is mostly missed; with 3, more of CIFAR-10 are found."""


@dataclass(frozen=True)
class OffTopic:
    """How far each image is from all classes, and from where on it is off topic."""

    scores: npt.NDArray[np.float32]
    """float32 [n], 1 - the cosine similarity to the nearest class"""
    threshold: float | None
    """None if it was not looked for."""
    found: npt.NDArray[np.bool_]
    """bool [n]"""
    why: str


def find_off_topic(features: torch.Tensor, labels: npt.NDArray[np.integer[Any]]) -> OffTopic:
    """Find images that are far from every class.

    Features behind a ReLU are compared by their square roots: a few strong ones then do not outweigh the many that an
    image without content lacks.

    Args:
        features: float [n, d], not centred: after subtracting their mean, images without content look like any other.
        labels: int [n]; a negative one belongs to no class.
    """
    units = unit_rows(features.float().sqrt() if bool((features >= 0).all()) else features)
    named = torch.from_numpy(labels).to(units.device)
    middles = torch.stack([_find_middle(units[named == label]) for label in named[named >= 0].unique()])
    scores = (1 - (units @ unit_rows(middles).T).amax(dim=1)).cpu().numpy()
    threshold = robust_limit(scores, _DEVIATIONS)
    why = f"1 - similarity to the nearest class: more than {threshold:.3f} is unusual in this data set"
    return OffTopic(scores, threshold, scores > threshold, why)


def _find_middle(members: torch.Tensor) -> torch.Tensor:
    """Return the median of the three quarters of a class that are nearest to its median: float32 [d].

    A minority moves it little: many blank images, which are near to one another, are found as well as a few.

    Args:
        members: float32 [members, d], of length 1.
    """
    near = members @ members.median(dim=0).values
    kept = near.topk(len(near) - len(near) // 4).indices
    return members[kept.sort().values].median(dim=0).values
