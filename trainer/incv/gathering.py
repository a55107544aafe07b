"""Gather predictions on every rank by all-reducing dense arrays, and check that each id is covered exactly once."""

import numpy as np
import numpy.typing as npt
import torch

from shards.errors import DataError
from trainer.distributed.world import World
from trainer.incv.predictions import Predictions, merge_predictions
from trainer.loading.sample_order import Ids

_FLOATS = ("loss", "given_probability", "predicted_probability", "second_probability")
_INTS = ("predicted", "second", "given_rank")
_ONCE = 1 << 16
"""A bit above those that encode a row: added once per prediction, so that the all-reduced sum counts predictions."""


def gather_predictions(world: World, part: Predictions, expected: Ids) -> Predictions:
    """Return the rows of all ranks, sorted by sample_id; raise DataError unless they cover `expected` exactly once.

    Each column is all-reduced as an int32 array over the expected ids, non-zero only in a rank's own rows. Floats are
    summed as int32 bit patterns; all other ranks add zero, so the bits are preserved.
    """
    if world.rank_group is None:
        return merge_predictions([part], expected)
    ids = np.sort(expected)
    places = np.searchsorted(ids, part.sample_id)
    known = places < len(ids)
    known[known] = ids[places[known]] == part.sample_id[known]
    facts = np.zeros(len(ids) + 1, np.int32)
    facts[-1] = np.count_nonzero(~known)  # summed too: if one rank raised alone, its peers would hang
    # Use add.at instead of assignment: an id that one rank has twice must count twice.
    np.add.at(facts, places[known], _facts(part)[known])
    world.all_reduce(torch.from_numpy(facts))
    if facts[-1]:
        raise DataError(
            f"{facts[-1]:,} predictions are for samples that were not held out: their files belong to another run. "
            "Restart the stage with `--redo incv`"
        )
    facts = facts[:-1]
    if not np.array_equal(facts // _ONCE, np.ones_like(facts)):
        given = facts // _ONCE
        raise DataError(
            f"of {len(ids):,} held-out samples, {int((given == 0).sum()):,} were not predicted and "
            f"{int((given > 1).sum()):,} were predicted more than once, but each must be predicted exactly once. "
            "Restart the stage with `--redo incv`"
        )
    columns: dict[str, npt.NDArray[np.generic]] = {
        "sample_id": ids,
        "agrees": (facts & 1).astype(bool),
        "status": ((facts >> 1) & 3).astype(np.int8),
        "fold": ((facts % _ONCE) >> 3).astype(np.int8),
    }
    columns |= {name: _sum(world, ids, places, getattr(part, name)) for name in _INTS}
    columns |= {
        name: _sum(world, ids, places, getattr(part, name).view(np.int32)).view(np.float32) for name in _FLOATS
    }
    return Predictions(**columns)  # type: ignore[arg-type]


def _facts(part: Predictions) -> npt.NDArray[np.int32]:
    facts = part.agrees.astype(np.int32) | (part.status.astype(np.int32) << 1) | (part.fold.astype(np.int32) << 3)
    return facts + np.int32(_ONCE)


def _sum(
    world: World, ids: Ids, places: npt.NDArray[np.int64], column: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    dense = np.zeros(len(ids), np.int32)
    dense[places] = column
    world.all_reduce(torch.from_numpy(dense))
    return dense
