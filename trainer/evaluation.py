"""Top-1 and top-5 by exact integer counts: of each network, and of the mean of their probabilities."""

from collections.abc import Iterable
from typing import Any

import torch

from trainer.loading.batch import Batch
from trainer.world import World

_TOP = 5


def hits(scores: torch.Tensor, labels: torch.Tensor) -> dict[str, int]:
    """How many rows have their label first, and among the first five. scores: [rows, classes]."""
    first = scores.topk(min(_TOP, scores.shape[1]), dim=1).indices == labels[:, None]
    first &= torch.isfinite(scores).all(dim=1, keepdim=True)  # a network that answers NaN has hit nothing
    return {"top1": int(first[:, 0].sum()), "top5": int(first.any(dim=1).sum())}


def count_hits(passes: Iterable[tuple[Batch, list[torch.Tensor]]]) -> dict[str, Any]:
    """Counts over a forward pass; an image that cannot be read counts as missed by everyone."""
    total = unreadable = 0
    networks: list[dict[str, int]] = []
    ensemble = {"top1": 0, "top5": 0}
    for batch, logits in passes:
        total += int((batch.ids >= 0).sum())
        unreadable += int(((batch.ids >= 0) & (batch.weights == 0)).sum())
        real = batch.weights > 0
        labels = batch.labels[real]
        networks = networks or [{"top1": 0, "top5": 0} for _ in logits]
        for counted, scores in zip(networks, logits, strict=True):
            _add(counted, hits(scores[real], labels))
        if len(logits) > 1:
            mean = torch.stack([scores[real].softmax(dim=1) for scores in logits]).mean(dim=0)
            _add(ensemble, hits(mean, labels))
    return {
        "count": total,
        "unreadable": unreadable,
        "networks": networks,
        "ensemble": ensemble if len(networks) > 1 else None,
    }


def summed(world: World, counted: dict[str, Any], networks: int) -> dict[str, Any]:
    """The counts of all ranks together. networks: how many were evaluated; a rank without a sample cannot know."""
    own = counted["networks"] or [{"top1": 0, "top5": 0}] * networks
    pairs = [*own, counted["ensemble"] or {"top1": 0, "top5": 0}]
    numbers = [counted["count"], counted["unreadable"], *(pair[top] for pair in pairs for top in ("top1", "top5"))]
    count, unreadable, *hit = world.sum_(torch.tensor(numbers)).tolist()
    *each, ensemble = [{"top1": hit[i], "top5": hit[i + 1]} for i in range(0, len(hit), 2)]
    return {
        "count": count,
        "unreadable": unreadable,
        "networks": each,
        "ensemble": ensemble if networks > 1 else None,
    }


def _add(counted: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        counted[name] += count
