"""Counts the hits of each network, top-1 and top-5, and of the ensemble, which averages their probabilities."""

from collections.abc import Iterable
from typing import Any

import torch

from trainer.distributed.world import World
from trainer.loading.batch import Batch
from trainer.methods.epoch_evaluation import Accuracy

_TOP = 5


def hits(scores: torch.Tensor, labels: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Count top-1 and top-5 hits over the real rows (not padding): int64 [2]. scores: [rows, classes]."""
    first = scores.topk(min(_TOP, scores.shape[1]), dim=1).indices == labels[:, None]
    # A row with a NaN or infinite score counts as wrong.
    first &= torch.isfinite(scores).all(dim=1, keepdim=True) & real[:, None]
    return torch.stack([first[:, 0].sum(), first.any(dim=1).sum()])


def count_hits(passes: Iterable[tuple[Batch, list[torch.Tensor]]], labels: torch.Tensor) -> dict[str, Any]:
    """Count the hits of all networks over a forward pass. An unreadable image counts as wrong.

    labels: int64 [samples], indexed by sample_id, on the device of the batches.

    The sums stay on the device until the end, so that there is no host-device sync between batches.
    """
    sums: torch.Tensor | None = None
    for batch, logits in passes:
        there, real = batch.ids >= 0, batch.weights > 0
        judges = list(logits)
        if len(logits) > 1:
            judges.append(torch.stack([scores.softmax(dim=1) for scores in logits]).mean(dim=0))
        counted = torch.stack([there.sum(), (there & ~real).sum()])
        counted = torch.cat([counted, *(hits(scores, labels[batch.ids.clamp(min=0)], real) for scores in judges)])
        sums = counted if sums is None else sums + counted
    total, unreadable, *hit = sums.tolist() if sums is not None else (0, 0)
    pairs = [{"top1": hit[i], "top5": hit[i + 1]} for i in range(0, len(hit), 2)]
    ensemble = pairs.pop() if len(pairs) > 1 else None
    return {"count": total, "unreadable": unreadable, "networks": pairs, "ensemble": ensemble}


def count_label_hits(
    passes: Iterable[tuple[Batch, list[torch.Tensor]]], labels: torch.Tensor, networks: int
) -> torch.Tensor:
    """Count the readable rows, then their top-1 hits: those of each network for the first kind of label, and so on.

    labels: int64 [kinds, samples], indexed by sample_id, on the device of the batches; networks: their number, which
    a rank without samples cannot infer. Returns int64 [1 + kinds * networks].
    """
    sums = torch.zeros(1 + len(labels) * networks, dtype=torch.int64, device=labels.device)
    for batch, logits in passes:
        real = batch.weights > 0
        wanted = labels[:, batch.ids.clamp(min=0)]
        found = torch.stack([scores.argmax(dim=1) for scores in logits])
        hit = (found == wanted[:, None]) & real  # [kinds, networks, rows]
        sums[0] += real.sum()
        sums[1:] += hit.sum(dim=2).flatten()
    return sums


def reduce_counts(world: World, counted: dict[str, Any], networks: int) -> dict[str, Any]:
    """Sum the counts over all ranks. networks: their number, which a rank without samples cannot infer."""
    own = counted["networks"] or [{"top1": 0, "top5": 0}] * networks
    pairs = [*own, counted["ensemble"] or {"top1": 0, "top5": 0}]
    numbers = [counted["count"], counted["unreadable"], *(pair[top] for pair in pairs for top in ("top1", "top5"))]
    count, unreadable, *hit = world.all_reduce(torch.tensor(numbers)).tolist()
    *each, ensemble = [{"top1": hit[i], "top5": hit[i + 1]} for i in range(0, len(hit), 2)]
    return {
        "count": count,
        "unreadable": unreadable,
        "networks": each,
        "ensemble": ensemble if networks > 1 else None,
    }


def top1_accuracy(counted: dict[str, Any]) -> Accuracy:
    """Return the top-1 accuracy. counted: over all ranks."""
    return Accuracy.of_hits([network["top1"] for network in counted["networks"]], counted["count"])
