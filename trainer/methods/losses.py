"""Cross-entropy of each row, in fp32 at any precision."""

import torch
import torch.nn.functional as F


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each row: [rows], in fp32 at any precision (fp64 for fp64 logits)."""
    return target_losses(logits, labels)


def target_losses(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the cross-entropy of each row with its target: [rows], in fp32 at any precision (fp64 for fp64 logits).

    targets: labels, int64 [rows], or probabilities, float [rows, classes]; smoothing: the share of each target that
    is spread evenly over the classes.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
