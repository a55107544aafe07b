"""Merges the tables of all shards into the index; writes dataset.json last, which marks the folder as complete."""

import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from shards.duplicates import count_repeated, find_duplicates
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
