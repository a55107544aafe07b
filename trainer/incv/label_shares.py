"""Predict each class as often as the labels have it: a shift of the logits by one number per class.

A network that models the given labels predicts each class with a mean probability equal to the class's share of the
labels, whatever the noise. One that has learned little, as under strong noise, does not: it neglects single classes,
and then INCV selects hardly any sample of them. The shift restores the means (prior correction, Saerens et al. 2002).
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from trainer.loading.batch import Batch
from trainer.methods.predict import Passes

_SMALLEST = 1e-12
"""Smaller mean probabilities count as this, so that the shift is finite."""


def sum_probabilities(passes: Passes, classes: int) -> torch.Tensor:
    """Return the sums of each class's probabilities over the usable rows of a predict pass of one network, and the
    number of these rows: float64 [classes + 1], in host memory. All zero on a rank without rows."""
    sums: torch.Tensor | None = None
    for batch, (logits,) in passes:
        p = torch.softmax(logits, dim=1).double()
        usable = (batch.ids >= 0) & (batch.weights > 0) & torch.isfinite(p).all(dim=1)
        part = torch.where(usable[:, None], torch.cat([p, torch.ones_like(p[:, :1])], dim=1), 0.0).sum(dim=0)
        sums = part if sums is None else sums + part
    return torch.zeros(classes + 1, dtype=torch.float64) if sums is None else sums.cpu()


def match_shares(sums: torch.Tensor, labels: npt.NDArray[np.integer]) -> torch.Tensor:
    """Return the shift of the logits, log(share of the labels / mean probability) of each class: float32 [classes].

    sums: of `sum_probabilities`, over all ranks; labels: the given labels of the samples. Each class counts as if it
    had one label more, so that a class without any is not ruled out.
    """
    mean = (sums[:-1] / sums[-1].clamp(min=1.0)).clamp(min=_SMALLEST)
    counts = torch.from_numpy(np.bincount(labels, minlength=len(mean))) + 1.0
    return (torch.log(counts / counts.sum()) - torch.log(mean)).float()


def shift_logits(passes: Passes, shift: torch.Tensor) -> Iterator[tuple[Batch, list[torch.Tensor]]]:
    """Yield the pass with `shift`, [classes], added to the logits of every row."""
    for batch, outputs in passes:
        shift = shift.to(batch.ids.device)
        yield batch, [logits + shift for logits in outputs]
