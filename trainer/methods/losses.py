"""Cross-entropy and generalised cross-entropy of each row, in fp32 at any precision."""

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import torch.nn.functional as F

from trainer.config.losses import find_loss
from trainer.config.schema import LabelTrainingConfig

RowLosses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with (logits, targets); returns the loss of each row, [rows], in fp32 at any precision.

logits: [rows, classes]; targets: labels, int64 [rows], or with mixup probabilities, float [rows, classes].
"""


def build_row_losses(section: LabelTrainingConfig) -> RowLosses:
    """Return the loss that a training's section asks for."""
    module, _, function = find_loss(section.loss.kind).function.partition(":")
    options = section.loss.model_dump(exclude={"kind"})
    return partial(getattr(import_module(module), function), smoothing=section.label_smoothing, **options)


def target_losses(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy of each row with its target: [rows], in fp32 at any precision (fp64 for fp64 logits).

    targets: labels, int64 [rows], or probabilities, float [rows, classes]; smoothing: the share of each target that
    is spread evenly over the classes.
    """
    logits = at_least_fp32(logits)
    targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def generalised_losses(logits: torch.Tensor, targets: torch.Tensor, q: float, smoothing: float = 0.0) -> torch.Tensor:
    """Return the generalised cross-entropy (1 - p^q) / q of each row (Zhang and Sabuncu 2018): [rows], in fp32.

    p: the probability of the label. As q tends to 0, this is the cross-entropy -log p; with q = 1 it is 1 - p. Its
    gradient is p^q times that of the cross-entropy, so that labels that the network finds unlikely count little.
    targets, smoothing: as of `target_losses`.
    """
    of_classes = -torch.expm1(q * F.log_softmax(at_least_fp32(logits), dim=1)) / q
    if targets.is_floating_point():
        losses = (targets.to(of_classes.dtype) * of_classes).sum(dim=1)
    else:
        losses = of_classes.gather(1, targets[:, None])[:, 0]
    return losses if smoothing == 0.0 else (1 - smoothing) * losses + smoothing * of_classes.mean(dim=1)


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32, or as they are if they are fp64: losses are computed so at any precision."""
    return logits if logits.dtype == torch.float64 else logits.float()
