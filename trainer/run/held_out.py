"""The samples that `data.eval_fraction` holds out of training: a seeded, stratified split."""

import numpy as np
import numpy.typing as npt

from trainer.loading.sample_order import Ids, derive_stream, mix64


def split_held_out(seed: int, ids: Ids, labels: npt.NDArray[np.int64], fraction: float) -> Ids:
    """Return the ids to hold out, ascending: `fraction` of each class, rounded, but never all of a class.

    labels: of the same samples. Which samples of a class are held out depends on the seed and on the ids alone.
    """
    if not fraction or not len(ids):
        return ids[:0]
    shuffled = np.argsort(mix64(derive_stream(seed, "data.eval_fraction"), ids), kind="stable")
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels)
    place = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    quota = np.minimum(np.floor(counts * fraction + 0.5).astype(np.int64), counts - 1)
    return np.sort(ids[by_class[place < np.repeat(quota, counts)]])
