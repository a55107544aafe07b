"""Counts the hits of each network, top-1 and top-5, and of the ensemble, which averages their probabilities."""

from collections.abc import Sequence
from typing import Any

import torch

from trainer.distributed.world import World
from trainer.methods.epoch_evaluation import Accuracy
from trainer.passes.outputs import NetworkRows, Output
from trainer.passes.table import SampleTable

_TOP = 5


def _judge(rows: Sequence[NetworkRows], readable: torch.Tensor) -> torch.Tensor:
    """Whether a row is a top-1 and a top-5 hit of each network and, after them, of the ensemble of several.

    Returns bool [rows, networks, 2]. An unreadable image and a NaN or infinite score are no hit.
    """
    judges = [network.logits for network in rows]
    if len(rows) > 1:
        judges.append(torch.stack([network.logits.softmax(dim=1) for network in rows]).mean(dim=0))
    return torch.stack([_hits(scores, rows[0].labels, readable) for scores in judges], dim=1)


def _hits(scores: torch.Tensor, labels: torch.Tensor, readable: torch.Tensor) -> torch.Tensor:
    first = scores.topk(min(_TOP, scores.shape[1]), dim=1).indices == labels[:, None]
    first &= torch.isfinite(scores).all(dim=1, keepdim=True) & readable[:, None]
    return torch.stack([first[:, 0], first.any(dim=1)], dim=1)


HITS = Output("hits", of_all=_judge)
PREDICTED = Output("predicted", of_network=lambda rows: rows.logits.argmax(dim=1))


def count_hits(world: World, own: SampleTable, networks: int) -> dict[str, Any]:
    """Count the `HITS` of all ranks; a collective.

    Args:
        own: the rows of this rank.
        networks: their number, which a rank without samples cannot infer.
    """
    judges = networks + (networks > 1)
    counts = torch.zeros(2 + 2 * judges, dtype=torch.int64, device=own.ids.device)
    if len(own):
        counts[0], counts[1] = len(own), (~own.readable).sum()
        counts[2:] = own["hits"].sum(dim=0).flatten()
    count, unreadable, *hit = world.all_reduce(counts).tolist()
    pairs = [{"top1": hit[i], "top5": hit[i + 1]} for i in range(0, len(hit), 2)]
    ensemble = pairs.pop() if networks > 1 else None
    return {"count": count, "unreadable": unreadable, "networks": pairs, "ensemble": ensemble}


def count_label_hits(
    world: World, own: SampleTable, labels: dict[str, torch.Tensor], networks: int
) -> dict[str, Accuracy]:
    """Return the accuracy of `PREDICTED` [rows, networks] on the readable images of all ranks; a collective.

    Args:
        own: the rows of this rank.
        labels: each kind of label, int64, by sample_id, on the device of the table.
    """
    counts = torch.zeros(1 + len(labels) * networks, dtype=torch.int64, device=own.ids.device)
    if len(own):
        counts[0] = own.readable.sum()
        wanted = torch.stack([of_kind[own.ids] for of_kind in labels.values()])
        counts[1:] = (own["predicted"] == wanted[:, :, None]).sum(dim=1).flatten()
    count, *hits = world.all_reduce(counts).tolist()
    return {
        kind: Accuracy.of_hits(hits[number * networks : (number + 1) * networks], count)
        for number, kind in enumerate(labels)
    }


def top1_accuracy(counted: dict[str, Any]) -> Accuracy:
    """Return the top-1 accuracy. counted: over all ranks."""
    return Accuracy.of_hits([network["top1"] for network in counted["networks"]], counted["count"])
