"""Logs the sample ids, draws (crops, operations, mixup) and chosen samples of every step, to compare two runs."""

import json
from pathlib import Path

import torch

from shards.durable import disk_errors
from shards.regular_file import open_to_append
from trainer.loading.batch import Batch


class Trace:
    """Writes logs/trace-rank<r>.jsonl: one line per step, after the step.

    A step that is repeated after a kill has two identical lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def step(self, training: str, step: int, batch: Batch, chosen: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Append the line of one step. chosen: small-loss sample_ids on this rank, for each of the two networks."""
        request = batch.request
        assert request is not None, "every loader attaches the request to its batch"
        real = request.real_rows
        line = {
            "training": training,
            "step": step,
            "ids": request.ids[:real].tolist(),
            "boxes": request.draws.boxes[:real].tolist(),
            "flips": request.draws.flips[:real].astype(int).tolist(),
            "chosen": [ids.tolist() for ids in chosen] if chosen is not None else None,
        }
        if request.draws.operations.size:
            line["operations"] = request.draws[:real].names()
        if request.mix is not None:
            line["partners"] = request.ids[request.mix.partners[:real]].tolist()
            line["shares"] = request.mix.shares[:real].tolist()
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self._path) as file:
                file.write(json.dumps(line).encode() + b"\n")
