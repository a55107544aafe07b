"""Gather predictions on every rank: an all-reduce of dense arrays, checked to cover each id exactly once."""

import numpy as np
import numpy.typing as npt
import torch

from shards.errors import DataError
from trainer.distributed.world import World
from trainer.incv.predictions import Predictions, merge_predictions
from trainer.loading.sample_order import Ids

_FLOATS = ("loss", "given_probability", "predicted_probability")
_ONCE = 1 << 16
"""A bit above all of a row's facts: in the all-reduced sum it counts the predictions of that row."""


def gather_predictions(world: World, part: Predictions, expected: Ids) -> Predictions:
    """All ranks' rows, sorted by sample_id; raises unless they cover the expected ids exactly once.

    Each column is an int32 array over the expected ids, non-zero only at a rank's own rows. Floats are summed as
    int32 bit patterns: every other rank adds zero, so they arrive bit for bit.
    """
    if world.rank_group is None:
        return merge_predictions([part], expected)
    ids = np.sort(expected)
    places = np.searchsorted(ids, part.sample_id)
    known = places < len(ids)
    known[known] = ids[places[known]] == part.sample_id[known]
    facts = np.zeros(len(ids) + 1, np.int32)
    facts[-1] = np.count_nonzero(~known)  # summed too: a rank raising alone would leave its peers in the all-reduce
    # add.at, not assignment: an id that one rank has twice must count twice.
    np.add.at(facts, places[known], _facts(part)[known])
    world.all_reduce(torch.from_numpy(facts))
    if facts[-1]:
        raise DataError(
            f"{facts[-1]:,} predictions are of samples that were not held out: their files are not of this run"
        )
    facts = facts[:-1]
    if not np.array_equal(facts // _ONCE, np.ones_like(facts)):
        given = facts // _ONCE
        raise DataError(
            f"of {len(ids):,} held-out samples {int((given == 0).sum()):,} were predicted by no rank and "
            f"{int((given > 1).sum()):,} by more than one: nothing is selected from such predictions"
        )
    columns: dict[str, npt.NDArray[np.generic]] = {
        "sample_id": ids,
        "fold": (facts & 1).astype(np.int8),
        "agrees": (facts & 2).astype(bool),
        "status": ((facts >> 2) & 3).astype(np.int8),
        "predicted": _sum(world, ids, places, part.predicted),
    }
    columns |= {
        name: _sum(world, ids, places, getattr(part, name).view(np.int32)).view(np.float32) for name in _FLOATS
    }
    return Predictions(**columns)  # type: ignore[arg-type]


def _facts(part: Predictions) -> npt.NDArray[np.int32]:
    facts = part.fold.astype(np.int32) | (part.agrees.astype(np.int32) << 1) | (part.status.astype(np.int32) << 2)
    return facts + np.int32(_ONCE)


def _sum(
    world: World, ids: Ids, places: npt.NDArray[np.int64], column: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    dense = np.zeros(len(ids), np.int32)
    dense[places] = column
    world.all_reduce(torch.from_numpy(dense))
    return dense
