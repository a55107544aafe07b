"""Features of more samples than fit into memory: one float16 file, whose rows every rank writes by itself."""

import json
import os
from pathlib import Path

import numpy as np
import torch

from shards.durable import disk_errors, sync
from shards.regular_file import open_regular, require_regular
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids


class FeatureFile:
    """float16 [ids, width] without a header, one row for each id, ascending; complete once it has its name.

    2.4 million samples of 1,536 features are 7.5 GB, on a disk that all ranks see; in memory they would be 15 GB in
    float32 on every rank, or a rank's share of it without the gather. Each batch waits for its features to reach the
    host. Rows are written by `pwrite`: mapped pages that two nodes share would overwrite each other's rows.
    """

    def __init__(self, path: Path, ids: Ids, world: World) -> None:
        """Remove what a stopped pass has left; a collective. ids: ascending, over all ranks."""
        self._path, self._ids, self._world = path, ids, world
        self._partial = path.with_name(f".{path.name}.partial")
        self._shape: tuple[int, ...] = ()

        def clear() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.unlink(missing_ok=True)

        world.run_on_rank0(clear)

    def write(self, ids: torch.Tensor, features: torch.Tensor) -> None:
        """Write the rows of a batch: float [rows, ...]; each run of consecutive ids at once."""
        values = features.half().cpu().numpy()
        self._shape = values.shape[1:]
        places = np.searchsorted(self._ids, ids.cpu().numpy())
        order = np.argsort(places)
        values, places = values[order], places[order]
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        with disk_errors(self._path):
            file = open_regular(self._partial, os.O_WRONLY | os.O_CREAT)
            try:
                for rows, (first, *_) in zip(np.split(values, breaks), np.split(places, breaks), strict=True):
                    _write_all(file, rows.tobytes(), int(first) * values[0].nbytes)
            finally:
                os.close(file)

    def finish(self, ids: torch.Tensor) -> torch.Tensor:
        """Let the file have its name once all ranks have written; return the rows of `ids`, mapped: a collective."""
        if self._shape:
            with disk_errors(self._path):
                sync(self._partial)
        shapes = {text for text in self._world.all_gather_strings(json.dumps(self._shape)) if text != "[]"}
        self._world.run_on_rank0(self._rename)
        shape = json.loads(shapes.pop()) if shapes else [0]
        # Pages are private: what a reader writes to them stays in its memory.
        mapped = np.memmap(self._path, np.float16, "c", shape=(len(self._ids), *shape))
        whole = torch.from_numpy(mapped)
        if len(ids) == len(self._ids):
            return whole
        return whole[torch.from_numpy(np.searchsorted(self._ids, ids.cpu().numpy()))]

    def _rename(self) -> None:
        with disk_errors(self._path):
            require_regular(self._path)
            os.replace(self._partial, self._path)
            sync(self._path.parent)


def _write_all(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
