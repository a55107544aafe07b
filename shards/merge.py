"""Merges the tables of all shards into the index, and lists duplicate images, which are not an error; writes
dataset.json last, which marks the folder as complete.
"""

import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.durable import write_parquet
from shards.plan import Plan
from shards.sample_index import REJECTED, TABLE, Dataset, write_index
from shards.shard_writer import Part
from shards.source_files import write_source_files
from shards.sources.source import Source, ignored_files


def merge(source: Source, out: Path, plan: Plan, parts: list[Part]) -> None:
    """Write the index tables and dataset.json. parts: one per shard, in order."""
    table = pa.concat_tables([part.table for part in parts]).sort_by("sample_id")
    same = find_duplicates(table)
    write_parquet(out / "duplicates.parquet", same)
    write_source_files(source, out, table)
    write_parquet(out / "rejected.parquet", _list_rejected(source, table))
    table = table.select(TABLE.names)
    checksum = write_index(out, table)
    converted = sum((Counter(part.converted) for part in parts), Counter[str]())
    dataset = Dataset(
        **asdict(plan),
        usable=sum(part.shard.samples for part in parts),
        converted=dict(sorted(converted.items())),
        repeated=count_repeated(same),
        index_checksum=checksum,
        shards=tuple(part.shard for part in parts),
    )
    dataset.write(out)
    # may fail on NFS, which renames open files instead of removing them: the lock file is still open
    shutil.rmtree(out / ".parts", ignore_errors=True)


def _list_rejected(source: Source, table: pa.Table) -> pa.Table:
    """Return the rejected and the misnamed images, by sample_id, and then the files that the source ignored."""
    rows = table.filter(pc.is_valid(table["reason"])).select(["sample_id", "key", "verdict", "reason"])
    origins = [source.origin(row) for row in rows["sample_id"].to_pylist()]
    rows = rows.append_column("origin", pa.array(origins, pa.string())).select(REJECTED.names)
    ignored = [{"key": file.path, "reason": file.reason} for file in ignored_files(source)]
    return pa.concat_tables([rows.cast(REJECTED), pa.Table.from_pylist(ignored, REJECTED)])


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
