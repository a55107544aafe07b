"""What the stage `features` found besides wrong labels: duplicates, off-topic images and bad pictures."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

CHECKS = ("blank", "dark", "bright", "blurred", "tiny", "odd_aspect")
"""The checks of images, as in examination.parquet."""
LEAK = "leak"
"""The column of examination.parquet that names the equal image of `incv.against`; only with that key."""
TITLES = {
    "conflict": "conflicting duplicate",
    "duplicate": "duplicate",
    LEAK: "also in the test set",
    "off_topic": "off-topic",
    **{name: name for name in CHECKS},
    "odd_aspect": "odd shape",
}
"""What a finding is called on the page."""


@dataclass(frozen=True, eq=False)
class Findings:
    """Arrays are indexed by sample_id."""

    groups: npt.NDArray[np.int64]
    """The first sample of the group of duplicates; -1 if there is no duplicate."""
    contradicted: npt.NDArray[np.bool_]
    """Whether a duplicate contradicts the label, which nobody has checked: see `find_conflicts`."""
    kinds: dict[str, npt.NDArray[np.bool_]]
    """Which images are `off_topic`, fail a check, or are a `leak`."""
    leaks: npt.NDArray[np.object_] | None
    """The key of the equal image of `incv.against`, or None; None as a whole if none were looked for."""

    def images_of(self, finding: str, rank: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample_ids with a finding of TITLES; of conflicting duplicates, both sides.

        rank: place in the list of suspicious labels, by sample_id. Groups of duplicates are not torn apart, and
        conflicting ones come first.
        """
        if finding not in ("conflict", "duplicate"):
            ids = np.flatnonzero(self.kinds.get(finding, np.zeros(0, np.bool_)))
            return ids[np.argsort(rank[ids], kind="stable")]
        conflicting = np.isin(self.groups, self.groups[self.contradicted])
        ids = np.flatnonzero(conflicting if finding == "conflict" else self.groups >= 0)
        first = np.full(len(rank), rank.max(initial=0))
        np.minimum.at(first, self.groups[ids], rank[ids])
        return ids[np.lexsort((rank[ids], self.groups[ids], first[self.groups[ids]], ~conflicting[ids]))]


def gather_findings(
    table: pa.Table,
    given: npt.NDArray[np.integer],
    probability: npt.NDArray[np.float32],
    checked: npt.NDArray[np.bool_] | None,
) -> Findings:
    """Return the findings of examination.parquet.

    Args:
        given: the labels, by sample_id.
        probability: of these labels, held out, by sample_id; NaN if unknown.
        checked: which labels were checked by hand, by sample_id: duplicates do not contradict them.
    """
    count, ids, own = len(given), table["sample_id"].to_numpy(), table["group"].to_numpy()
    groups, contradicted = np.full(count, -1, np.int64), np.zeros(count, np.bool_)
    several = np.bincount(own, minlength=len(own))[own] > 1
    groups[ids[several]] = ids[own[several]]
    sure = np.zeros(len(ids), np.bool_) if checked is None else checked[ids]
    believed = np.where(sure, np.inf, probability[ids])
    contradicted[ids] = find_conflicts(own, given[ids].astype(np.int64), believed) & ~sure
    contradicted[ids] &= ~table["blank"].to_numpy()  # of empty images, no label may be right
    kinds = {}
    for name in ("off_topic", *CHECKS):
        kinds[name] = np.zeros(count, np.bool_)
        kinds[name][ids] = table[name].to_numpy()
    leaks = None
    if LEAK in table.column_names:
        leaks, kinds[LEAK] = np.full(count, None, object), np.zeros(count, np.bool_)
        leaks[ids], kinds[LEAK][ids] = table[LEAK].to_pylist(), table[LEAK].is_valid().to_numpy()
    return Findings(groups, contradicted, kinds, leaks)


def find_conflicts(
    groups: npt.NDArray[np.int64], given: npt.NDArray[np.int64], probability: npt.NDArray[np.floating]
) -> npt.NDArray[np.bool_]:
    """Tell whose label differs from the label that its group of duplicates most likely has: bool [samples].

    At least so many labels are wrong, whatever the network knows.

    Args:
        groups: the row of the first image of the group of each image.
        probability: of the given label, held out; NaN if unknown.
    """
    conflicts = np.zeros(len(groups), np.bool_)
    members = np.flatnonzero((np.bincount(groups, minlength=len(groups))[groups] > 1) & (given >= 0))
    wide = int(given.max(initial=0)) + 1
    labelled, inverse = np.unique(groups[members] * wide + given[members], return_inverse=True)
    believed = np.bincount(inverse, weights=np.nan_to_num(probability[members]), minlength=len(labelled))
    order = np.lexsort((-believed, labelled // wide))
    names, first = np.unique(labelled[order] // wide, return_index=True)
    best = labelled[order][first] % wide
    conflicts[members] = best[np.searchsorted(names, groups[members])] != given[members]
    return conflicts
