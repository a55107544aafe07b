"""Chooses the samples of a cleaned data set, their labels and their file names: pure functions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from trainer.incv.selection_index import SelectionIndex, State
from trainer.loading.sample_order import Ids


@dataclass(frozen=True)
class CleanedSet:
    """The samples of a cleaned data set: columns of equal length, sorted by sample_id."""

    ids: Ids
    labels: npt.NDArray[np.int64]
    relabelled: npt.NDArray[np.bool_]
    """Whether the label is INCV's suggestion instead of the given one."""


def choose_samples(
    selection: SelectionIndex,
    given: npt.NDArray[np.int64],
    checked: npt.NDArray[np.bool_],
    least_probability: float | None = None,
) -> CleanedSet:
    """Return the selected samples, and the held-out ones whose label the prediction confirms, with given labels.

    checked: whether a label was checked by hand; such samples are kept with this label, if their image is readable.
    With `least_probability`, also return the samples that were not selected and whose held-out prediction contradicts
    the given label with at least this probability; their label is the prediction.
    """
    held_out = selection.state == State.HELD_OUT
    kept = (selection.state == State.SELECTED) | (held_out & ((selection.predicted == given) | checked))
    labels = given.copy()
    relabelled = np.zeros(len(kept), bool)
    if least_probability is not None:
        judged = np.isin(selection.state, (State.CANDIDATE, State.REMOVED)) | held_out
        judged &= (selection.predicted >= 0) & ~checked
        confident = selection.predicted_probability >= least_probability  # False for NaN
        relabelled = judged & confident & (selection.predicted != given)
        labels[relabelled] = selection.predicted[relabelled]
    ids = np.flatnonzero(kept | relabelled).astype(np.int64)
    return CleanedSet(ids, labels[ids], relabelled[ids])


def name_class_folders(class_names: Sequence[str]) -> list[str]:
    """Return one folder name per class: its name where that is safe and unique, else with its number added."""
    names = [name.replace("/", "_").replace("\0", "_").strip().lstrip(".") for name in class_names]
    names = [_shorten(name) or "class" for name in names]
    return _make_unique(names, [f"-{label}" for label in range(len(names))])


def name_files(keys: Sequence[str], suffixes: Sequence[str], ids: Ids, folders: Sequence[str]) -> list[str]:
    """Return `folder/file` for each sample: the base name of its key, plus the sample_id if it is not unique."""
    stems = [f"{folder}/{_safe_stem(key)}" for folder, key in zip(folders, keys, strict=True)]
    names = _make_unique(stems, [f"-{sample_id}" for sample_id in ids])
    return [f"{name}.{suffix}" for name, suffix in zip(names, suffixes, strict=True)]


def _make_unique(names: Sequence[str], endings: Sequence[str]) -> list[str]:
    """Add its ending to each name that occurs more than once; case does not count, as on some file systems."""
    counts = Counter(name.casefold() for name in names)
    taken = {name.casefold() for name in names}
    unique = []
    for name, ending in zip(names, endings, strict=True):
        if counts[name.casefold()] > 1:
            while name.casefold() in taken:
                name += ending
            taken.add(name.casefold())
        unique.append(name)
    return unique


def _shorten(name: str) -> str:
    return name.encode()[:150].decode(errors="ignore")  # a file name has at most 255 bytes


def _safe_stem(key: str) -> str:
    stem = PurePosixPath(key.replace("\0", "_")).name
    stem = stem[: stem.rfind(".")] if "." in stem[1:] else stem
    stem = stem.lstrip(".")
    return _shorten(stem) or "image"
