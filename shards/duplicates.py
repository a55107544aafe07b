"""Finds duplicate images by a hash of their original bytes. Duplicates are reported; they are not an error."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def find_duplicates(table: pa.Table) -> pa.Table:
    """Return one row (group, sample_id, key, label) for every image that occurs more than once.

    table: the index with a column `content`, the hash of each image; rejected images are ignored. The group is the
    smallest sample_id among equal images. Equal images with different labels show how noisy the labels are.
    """
    nothing = pa.scalar(None, table["content"].type)
    content = pc.if_else(pc.equal(table["verdict"], "ok"), table["content"], nothing)
    ids, groups = _groups(content.combine_chunks())
    rows = table.take(pa.array(ids, pa.int64())).select(["sample_id", "key", "label"])
    return rows.add_column(0, "group", pa.array(groups, pa.int64()))


def count_repeated(table: pa.Table) -> int:
    """Count the images that repeat an earlier one. table: the result of `find_duplicates`."""
    groups = table["group"].to_numpy()
    return len(groups) - len(np.unique(groups))


def _groups(content: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows whose content occurs more than once, and the first row of each one's group.

    Both arrays are ordered by group, then by row.
    """
    rows = np.flatnonzero(content.is_valid().to_numpy(zero_copy_only=False))
    whole = content.drop_null()
    words = np.frombuffer(whole.buffers()[1], dtype="<u8")[2 * whole.offset :][: 2 * len(whole)].reshape(-1, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))  # stable: rows of a group stay in order
    ordered = words[order]
    starts = np.r_[True, np.any(ordered[1:] != ordered[:-1], axis=1)] if len(ordered) else np.zeros(0, bool)
    run = np.cumsum(starts) - 1
    shared = np.bincount(run)[run] > 1 if len(run) else np.zeros(0, bool)
    first = rows[order[starts]][run] if len(run) else rows
    found, group = rows[order][shared], first[shared]
    by_group = np.lexsort((found, group))
    return found[by_group], group[by_group]
