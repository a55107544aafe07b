"""Folds for cross-validation that keep duplicates together: a duplicate in another fold would give its label away."""

import numpy as np
import numpy.typing as npt

from shards.errors import DataError

Ints = npt.NDArray[np.int64]


def stratified_group_folds(labels: Ints, groups: Ints, k: int, seed: int) -> Ints:
    """Assign each sample to a fold of 0 to k - 1: int64 [n]. A group is in one fold; each fold has nearly the same
    number of samples of each class.

    Groups of several samples come first, from large to small, each in the fold that has fewest of its classes. The
    single samples then level the folds, class by class.

    Args:
        labels: of the samples, int64 [n].
        groups: a number for each sample, int64 [n], equal for samples that must stay together.
    """
    classes, labels = np.unique(labels, return_inverse=True)
    names, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < k:
        raise DataError(f"{len(names)} distinct images are too few for {k} folds", fix="use fewer folds")
    random = np.random.default_rng(seed)
    folds = np.empty(len(labels), np.int64)
    counts = np.zeros((k, len(classes)), np.int64)
    by_group = np.argsort(groups, kind="stable")
    starts = np.cumsum(sizes) - sizes
    several = random.permutation(np.flatnonzero(sizes > 1))
    shares = 1 / np.bincount(labels)
    for group in several[np.argsort(-sizes[several], kind="stable")]:
        members = by_group[starts[group] : starts[group] + sizes[group]]
        present, times = np.unique(labels[members], return_counts=True)
        filled = counts[:, present] @ (times * shares[present])
        fold = np.lexsort((counts.sum(axis=1), filled))[0]
        folds[members] = fold
        counts[fold, present] += times
    single = random.permutation(by_group[starts[sizes == 1]])
    single = single[np.argsort(labels[single], kind="stable")]
    for label, members in enumerate(
        np.split(single, np.cumsum(np.bincount(labels[single], minlength=len(classes)))[:-1])
    ):
        added = _level(counts[:, label], counts.sum(axis=1), len(members))
        folds[members] = np.repeat(np.arange(k), added)
        counts[:, label] += added
    return folds


def _level(have: Ints, totals: Ints, more: int) -> Ints:
    """Return how many of `more` samples each fold gets so that their numbers are as equal as possible: int64 [k].

    have: the folds' samples of a class. totals: of all classes; folds with few get what cannot be divided.
    """
    order = np.lexsort((totals, have))
    steps = np.diff(have[order]) * np.arange(1, len(have))  # what raises the lowest 1, 2, ... folds to the next one
    lowest = int(np.searchsorted(np.cumsum(steps), more, side="right")) + 1
    filled = order[:lowest]
    level, rest = divmod(int(have[filled].sum()) + more, lowest)
    added = np.zeros_like(have)
    added[filled] = level - have[filled]
    added[filled[np.argsort(totals[filled], kind="stable")][:rest]] += 1
    return added
