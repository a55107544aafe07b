"""Features kept by the content of the image: a run computes only what no earlier run with the same network has.

features/<network>/00000.features    float16 [rows, width], without a header
                   00000.keys.npy    uint64 [rows]: hash of each image's bytes; 0: its features are not usable
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from shards.durable import write_array
from shards.errors import DataError
from shards.sample_index import SampleIndex
from trainer.distributed.world import World
from trainer.loading.sample_order import Ids, mix64
from trainer.passes.table import SampleTable

Keys = npt.NDArray[np.uint64]
PIECE = 2**16
"""Images of a part. A pass that is stopped loses what it has computed of one part."""


def content_keys(index: SampleIndex, ids: Ids) -> Keys:
    """Hash what the index says about the bytes of each image: checksum, length and size; never 0. [ids]"""
    bytes_ = index.crc32[ids].astype(np.uint64) << np.uint64(32) | index.nbytes[ids].astype(np.uint64)
    sides = index.width[ids].astype(np.uint64) << np.uint64(32) | index.height[ids].astype(np.uint64)
    return np.maximum(mix64(bytes_, sides), np.uint64(1))


@dataclass(frozen=True, eq=False)
class FeatureStore:
    """The parts in a folder, which belongs to one network with one input size; all ranks see it."""

    folder: Path
    world: World

    def fill(self, keys: Keys, ids: Ids, run_pass: Callable[[Ids, Path], SampleTable]) -> int:
        """Compute the features that are missing, part by part; a collective. Return how many images were missing.

        Args:
            keys: of `ids`, uint64 [ids].
            run_pass: computes the features of some ids, writes them to a file, and returns the status of each.
        """
        known = self.world.broadcast_from_rank0(lambda: len(self._parts()))
        have = np.unique(np.concatenate([np.empty(0, np.uint64), *(self._keys(part) for part in range(known))]))
        _, first = np.unique(keys, return_index=True)  # equal images once
        missing = first[~np.isin(keys[first], have)]
        missing = missing[np.argsort(ids[missing])]  # in the order of the table
        for number, start in enumerate(range(0, len(missing), PIECE), known):
            piece = missing[start : start + PIECE]
            usable = run_pass(ids[piece], self._features_path(number)).usable.cpu().numpy()
            self.world.run_on_rank0(partial(self._write_keys, keys[piece] * usable, number))
        return len(missing)

    def read(self, keys: Keys, columns: slice = slice(None)) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
        """Return features of images, float16 [keys, columns], and whether each image has any: bool [keys]."""
        features: npt.NDArray[np.float16] | None = None
        found = np.zeros(len(keys), np.bool_)
        for number in range(len(self._parts())):
            held = self._keys(number)
            order = np.argsort(held, kind="stable")
            places = np.searchsorted(held[order], keys).clip(max=len(held) - 1)
            here = (held[order[places]] == keys) & ~found
            rows = self._map(number, len(held))[:, columns]
            if features is None:
                features = np.zeros((len(keys), rows.shape[1]), np.float16)
            features[here] = rows[order[places[here]]]
            found |= here
        if features is None:
            raise DataError(f"{self.folder} holds no features: run the stage again with `--redo features`")
        return torch.from_numpy(features), found

    def _parts(self) -> list[Path]:
        """Return the finished parts, which are numbered from 0."""
        return sorted(self.folder.glob("*.keys.npy"))

    def _features_path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.features"

    def _write_keys(self, keys: Keys, number: int) -> None:
        write_array(self.folder / f"{number:05d}.keys.npy", keys)

    def _keys(self, number: int) -> Keys:
        path = self.folder / f"{number:05d}.keys.npy"
        try:
            keys: Keys = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            again = f"remove {self.folder}, and run the same command again"
            raise DataError(f"{path} is damaged ({error}): {again}") from None
        return keys

    def _map(self, number: int, rows: int) -> npt.NDArray[np.float16]:
        path = self._features_path(number)
        nbytes = path.stat().st_size if path.is_file() else 0
        if not rows or not nbytes or nbytes % (2 * rows):
            raise DataError(f"{path} is damaged or missing: remove {self.folder}, and run the same command again")
        return np.memmap(path, np.float16, "r", shape=(rows, nbytes // (2 * rows)))
