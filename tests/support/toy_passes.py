"""Passes over made-up images that hold their own id: some cannot be read, some are NaN."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.distributed.world import SINGLE_PROCESS, World
from trainer.loading.augment import Draws
from trainer.loading.batch import Batch, BatchRequest
from trainer.loading.sample_order import slice_for_rank
from trainer.passes.sample_pass import SamplePass

CLASSES, WIDTH = 4, 6
UNREADABLE, NON_FINITE = 5, 7
"""An id that is a multiple of the first cannot be read; of the others, a multiple of the second shows NaN."""


def image_of(sample: int) -> torch.Tensor:
    """uint8-like numbers that follow from the id alone: float32 [3, 2, 1]."""
    numbers = np.random.default_rng(max(sample, 0)).normal(size=(3, 2, 1)).astype(np.float32)
    shown = torch.from_numpy(numbers)
    return torch.full_like(shown, torch.nan) if sample > 0 and sample % NON_FINITE == 0 else shown


class ToyImages:
    """Stands in for an ImageSet, and for its loader; `stop_at` sets a stop request at this batch."""

    def __init__(self, order: int = 0, stop: Any = None, stop_at: int | None = None) -> None:
        self.loader, self._order, self._stop, self._stop_at = self, order, stop, stop_at

    def predict_requests(self, ids: np.ndarray, batch: int, world: World) -> list[BatchRequest]:
        mixed = np.random.default_rng(self._order).permutation(np.sort(ids))  # as by shards
        own = slice_for_rank(mixed, world.rank, world.size)
        return [
            BatchRequest(
                part,
                Draws(np.zeros((len(part), 4), np.int32), np.zeros(len(part), bool)),
                min(batch, len(own)),
                False,
            )
            for part in (own[first : first + batch] for first in range(0, len(own), batch))
        ]

    def batches(self, requests: list[BatchRequest]) -> Any:
        for number, request in enumerate(requests):
            if number == self._stop_at:
                self._stop.reason = lambda: "STOP file"
            ids = np.full(request.rows, -1)
            ids[: len(request.ids)] = request.ids
            images = torch.stack([image_of(sample) for sample in ids.tolist()])
            weights = torch.tensor([float(sample >= 0 and sample % UNREADABLE > 0) for sample in ids.tolist()])
            yield Batch(torch.from_numpy(ids), images, weights)


class ToyNetwork(nn.Module):
    """Features are the pixels; each number of a row is computed from the row alone, whatever the batch."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.from_numpy(np.random.default_rng(seed).normal(size=(CLASSES, WIDTH))).float()
        )

    def forward_features(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)

    def forward_head(self, maps: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return maps if pre_logits else (maps[:, None] * self.weight).sum(dim=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(images))


def toy_pass(world: World = SINGLE_PROCESS, batch: int = 4, order: int = 0, stop_at: int | None = None) -> SamplePass:
    stop = SimpleNamespace(reason=lambda: None, wait_for_reason=lambda: "STOP file")
    ctx = SimpleNamespace(
        world=world,
        execution=SimpleNamespace(predict_batch=batch, graphs="auto"),
        heartbeat=SimpleNamespace(update=lambda *arguments: None),
        stop=stop,
    )
    images: Any = ToyImages(order, stop, stop_at)
    return SamplePass(lambda doing: images, "fp32", ctx, "toy: {doing}")  # type: ignore[arg-type]
