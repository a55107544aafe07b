"""What a network learns from each row: its label or, with mixup, a mixture of two labels."""

import torch

from trainer.acceleration.cuda_graphs import Inputs


def build_targets(inputs: Inputs, part: slice, classes: int) -> torch.Tensor:
    """Return the targets of the rows in `part`: labels, int64 [rows]; with mixup, float32 [rows, classes]."""
    labels = inputs["labels"][part]
    if "shares" not in inputs:
        return labels
    return mix_labels(labels, inputs["partners"][part], inputs["shares"][part], classes)


def mix_labels(labels: torch.Tensor, partners: torch.Tensor, shares: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the probability of each class: `shares` for the label, the rest for the partner's: [rows, classes].

    labels, partners: int64 [rows]; shares: float32 [rows]. Needs no host-device sync and no atomic addition.
    """
    every, own = torch.arange(classes, device=labels.device), shares[:, None]
    return (labels[:, None] == every) * own + (partners[:, None] == every) * (1 - own)


def agreement(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the share of its target that the most likely class has: [rows]; for labels, 0 or 1."""
    predicted = logits.argmax(1)
    if not targets.is_floating_point():
        return predicted == targets
    return targets.gather(1, predicted[:, None])[:, 0]
