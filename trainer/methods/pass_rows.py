"""What a predict pass computed for each sample, kept on the rank that computed it, and gathered from all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trainer.distributed.world import World
from trainer.loading.sample_order import Ids
from trainer.methods.predict import Passes

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PassRows:
    """One row of numbers for each sample that a rank could use: read, and with finite numbers."""

    ids: Ids
    values: Floats
    """[len(ids), width]; [0, 0] on a rank without samples."""


def collect_rows(passes: Passes, count: int, convert: Callable[[torch.Tensor], torch.Tensor]) -> PassRows:
    """Collect the rows of a predict pass of one network in host memory, without unreadable and non-finite ones.

    count: samples of this rank, at most; convert: what to keep of the network's outputs [rows, width], row by row.
    """
    ids, values, kept = np.empty(count, np.int64), np.empty((0, 0), np.float32), 0
    for batch, (outputs,) in passes:
        rows = convert(outputs)
        usable = ((batch.ids >= 0) & (batch.weights > 0) & torch.isfinite(rows).all(dim=1)).cpu()
        chosen = rows.cpu()[usable].numpy()
        if not kept and values.shape != (count, chosen.shape[1]):
            values = np.empty((count, chosen.shape[1]), np.float32)
        ids[kept : kept + len(chosen)] = batch.ids.cpu()[usable].numpy()
        values[kept : kept + len(chosen)] = chosen
        kept += len(chosen)
    return PassRows(ids[:kept], values[:kept])


@dataclass(frozen=True)
class GatheredRows:
    """The rows of all ranks, of which blocks of columns can be read; every method of it is a collective."""

    world: World
    own: PassRows
    ids: Ids
    """Of all ranks' rows, ascending."""
    places: npt.NDArray[np.int64]
    """The place in `ids` of each row of this rank."""
    width: int

    def columns(self, first: int, last: int) -> Floats:
        """Return the columns from `first` to before `last`, by column: [last - first, len(ids)].

        Each number is non-zero on one rank only, so that the sum over the ranks has its bits at any world size.
        """
        dense = np.zeros((last - first, len(self.ids)), np.float32)
        if len(self.own.ids):
            dense[:, self.places] = self.own.values[:, first:last].T
        self.world.all_reduce(torch.from_numpy(dense))
        return dense

    def rows(self, ids: Ids) -> Floats:
        """Return the rows of these samples, which are among `ids`: [len(ids), width]."""
        dense = np.zeros((len(ids), self.width), np.float32)
        own_row = np.full(len(self.ids), -1)
        own_row[self.places] = np.arange(len(self.places))
        wanted = own_row[np.searchsorted(self.ids, ids)]
        if len(self.own.ids):
            dense[wanted >= 0] = self.own.values[wanted[wanted >= 0]]
        self.world.all_reduce(torch.from_numpy(dense))
        return dense


def gather_rows(world: World, own: PassRows, samples: Ids) -> GatheredRows:
    """Agree on whose rows there are, among `samples`, and on their width; a collective."""
    every = np.sort(samples)
    found = np.zeros(len(every), np.int32)
    found[np.searchsorted(every, own.ids)] = 1
    world.all_reduce(torch.from_numpy(found))
    widths = world.all_gather(torch.tensor([own.values.shape[1]]))
    ids = every[found > 0]
    return GatheredRows(world, own, ids, np.searchsorted(ids, own.ids), max(int(width) for width in widths))
