"""Writing one shard: rows of a source, checked, into a tar whose bytes depend on nothing but those rows."""

import hashlib
import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shards.durable import write_parquet, write_with
from shards.errors import DataError
from shards.image_check import check_image
from shards.sample_index import IN_NO_SHARD, TABLE, ShardFile, shard_name
from shards.sources.source import RawSample, Source

_TAR_BLOCK = 512
_SUFFIXES = ("png", "jpg")
_SHARD_FACTS = b"incv.shard"


def member_key(sample_id: int) -> str:
    """The name of a tar member, without its suffix."""
    return f"{sample_id:09d}"


def part_path(out: Path, shard: int) -> Path:
    """The table of one finished shard, kept until all are merged."""
    return out / ".parts" / f"{Path(shard_name(shard)).stem}.parquet"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_shard(source: Source, out: Path, shard: int, rows: range) -> None:
    """The tar first, then its part table: a part on disk means that its tar is whole."""
    path = out / shard_name(shard)
    lines: list[dict[str, Any]] = []

    def write(temporary: Path) -> None:
        lines.extend(_write_tar(source, temporary, shard, rows))

    write_with(path, write)
    samples = sum(line["shard"] != IN_NO_SHARD for line in lines)
    facts = ShardFile(path.name, path.stat().st_size, file_sha256(path), samples)
    table = pa.Table.from_pylist(lines, schema=TABLE)
    table = table.replace_schema_metadata({_SHARD_FACTS: json.dumps(asdict(facts))})
    write_parquet(part_path(out, shard), table)


def read_part(out: Path, shard: int) -> tuple[ShardFile, pa.Table] | None:
    """A shard finished earlier, or None where it has to be written (again)."""
    part = part_path(out, shard)
    if not part.is_file():
        return None
    table = pq.read_table(part, partitioning=None)
    facts = ShardFile(**json.loads(table.schema.metadata[_SHARD_FACTS]))
    tar = out / facts.file
    if not tar.is_file() or tar.stat().st_size != facts.nbytes:
        return None
    return facts, table.replace_schema_metadata(None)


def _write_tar(source: Source, path: Path, shard: int, rows: range) -> list[dict[str, Any]]:
    from webdataset import (
        TarWriter,  # here, because it imports torch: only those who write shards wait for it
    )

    # all that a tar header says beside name and size is fixed, so that the same rows give the same bytes
    fixed = {"user": "incv", "group": "incv", "mode": 0o444, "mtime": 0}
    lines = []
    with path.open("wb") as file, TarWriter(file, encoder=False, compress=False, **fixed) as tar:
        for row in rows:
            sample = source.sample(row)
            line = _checked_line(source.name, row, sample)
            if line["verdict"] == "ok":
                line |= {"shard": shard, "offset": tar.tarstream.offset + _TAR_BLOCK}
                tar.write({"__key__": member_key(row), sample.suffix: sample.data})
                padded = -(-len(sample.data) // _TAR_BLOCK) * _TAR_BLOCK
                assert tar.tarstream.offset == line["offset"] + padded, "a header of more than one block"
            lines.append(line)
    return lines


def _checked_line(source_name: str, row: int, sample: RawSample) -> dict[str, Any]:
    """The row of the index for `sample`, as if rejected; a usable one gets its place in the tar."""
    if sample.suffix not in _SUFFIXES:
        raise DataError(f"{sample.key}: only {' and '.join(_SUFFIXES)} can be packed, not {sample.suffix!r}")
    facts = check_image(sample.data)
    usable = facts.verdict == "ok"
    return {
        "sample_id": row,
        "key": sample.key,
        "shard": IN_NO_SHARD,
        "offset": 0,
        "nbytes": len(sample.data) if usable else 0,
        "label": sample.label,
        "source": source_name,
        "width": facts.width,
        "height": facts.height,
        "verdict": facts.verdict,
        "crc32": zlib.crc32(sample.data) if usable else 0,
    }
