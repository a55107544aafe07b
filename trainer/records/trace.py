"""What every step was made of, for whoever wants to hold two runs against each other: ids, boxes, chosen rows."""

import json
from pathlib import Path

import torch

from shards.durable import disk_errors
from trainer.loading.batch import Batch


class Trace:
    """logs/trace-rank<r>.jsonl: one line a step and rank, written when the step has been made.

    A step that is made again after a kill has two lines; they are equal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def step(self, training: str, step: int, batch: Batch, chosen: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """chosen: the sample_ids of this rank that were easy for each of two networks."""
        request = batch.request
        assert request is not None, "every loader says what it was asked for"
        real = request.real_rows
        line = {
            "training": training,
            "step": step,
            "ids": request.ids[:real].tolist(),
            "boxes": request.boxes[:real].tolist(),
            "flips": request.flips[:real].astype(int).tolist(),
            "chosen": [ids.tolist() for ids in chosen] if chosen is not None else None,
        }
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
