"""Writes one shard: converts rows of a source and stores them in a tar whose bytes depend only on those rows."""

import hashlib
import json
import os
import tarfile
import zlib
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from shards.durable import sync, write_atomically, write_parquet
from shards.errors import DataError
from shards.image_formats import explain_misnamed, explain_verdict
from shards.image_store import StoredImage, convert_image
from shards.plan import Plan
from shards.sample_index import IN_NO_SHARD, TABLE, Dataset, ShardFile, shard_name, suggest_packing
from shards.source_files import FILE_COLUMNS, NO_FILE, hash_content, stat_file
from shards.sources.source import RawSample, Source

_FACTS = b"incv.shard"
_PART = pa.schema([*TABLE, *FILE_COLUMNS, pa.field("reason", pa.string())])


class ShardTar:
    """Writes a tar with WebDataset's writer; all header fields other than name and size are constant."""

    def __init__(self, file: BinaryIO) -> None:
        from webdataset import TarWriter  # imported here: it imports torch, which takes seconds

        self._hashed = _Hashed(file)
        self._tar = TarWriter(
            self._hashed, encoder=False, compress=False, user="incv", group="incv", mode=0o444, mtime=0
        )

    def add(self, key: str, suffix: str, data: bytes) -> int:
        """Append a member; return the offset of its first byte."""
        offset: int = self._tar.tarstream.offset + tarfile.BLOCKSIZE
        self._tar.write({"__key__": key, suffix: data})
        assert self._tar.tarstream.offset == offset + len(data) + -len(data) % tarfile.BLOCKSIZE, (
            "the header takes more than one block"
        )
        return offset

    def finish(self) -> str:
        """Finish the tar and return its SHA-256."""
        self._tar.close()
        return self._hashed.digest.hexdigest()

    def __enter__(self) -> "ShardTar":
        return self

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):  # e.g. a full disk, which an earlier write has reported
            self._tar.close()


class _Hashed:
    """A file object that hashes everything written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self.digest.update(piece)
        return self._file.write(piece)


@dataclass(frozen=True)
class Part:
    """One finished shard.

    converted: number of images by kind of conversion; table: its rows of the index, with the additional columns
    FILE_COLUMNS and `reason`. `content` is a hash of the original bytes, so that duplicates are found regardless of
    conversion; `reason` says why an image was rejected or that its name does not tell its format (null otherwise).
    """

    shard: ShardFile
    converted: dict[str, int]
    table: pa.Table


def member_key(sample_id: int) -> str:
    """Return the name of a sample's tar member, without the suffix."""
    return f"{sample_id:09d}"


def part_path(out: Path, shard: int) -> Path:
    """Return the path of a finished shard's table, which is kept until all shards are merged."""
    return out / ".parts" / f"{Path(shard_name(shard)).stem}.parquet"


def write_shard(source: Source, out: Path, plan: Plan, shard: int) -> None:
    """Write the tar, then its table: if the table exists, the tar is complete."""
    path = out / shard_name(shard)
    lines: list[dict[str, Any]] = []
    converted: Counter[str] = Counter()
    hashes: list[str] = []

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file, ShardTar(file) as tar:
            for row in plan.rows(shard):
                line, kinds = _write_row(source, tar, plan, shard, row)
                lines.append(line)
                converted.update(kinds)
            hashes.append(tar.finish())

    write_atomically(path, write)
    samples = sum(line["shard"] != IN_NO_SHARD for line in lines)
    facts = {
        "shard": asdict(ShardFile(path.name, path.stat().st_size, hashes[0], samples)),
        "converted": dict(sorted(converted.items())),
        "plan": plan.checksum,
    }
    table = pa.Table.from_pylist(lines, schema=_PART)
    write_parquet(part_path(out, shard), table.replace_schema_metadata({_FACTS: json.dumps(facts)}))


def read_part(out: Path, plan: Plan, shard: int) -> Part | None:
    """Return a shard that was finished earlier, or None if it has to be written (again)."""
    path = part_path(out, shard)
    try:
        table = pq.read_table(path, partitioning=None)
        facts = json.loads(table.schema.metadata[_FACTS])
        file = ShardFile(**facts["shard"])
    except (OSError, pa.ArrowException, TypeError, LookupError, ValueError):  # missing, or not written by incv
        return None
    tar = out / file.file
    if facts.get("plan") != plan.checksum or not tar.is_file() or tar.stat().st_size != file.nbytes:
        return None
    if table.schema.names != _PART.names:  # written by an earlier version
        return None
    return Part(file, facts["converted"], table.replace_schema_metadata(None))


def repair_shard(source: Source, out: Path, plan: Plan, dataset: Dataset, shard: int) -> None:
    """Rewrite a damaged shard, bit-identical to the original. The caller must hold the lock of the folder."""
    place, expected = out / ".parts" / "repaired", dataset.shards[shard]
    write_shard(source, place, plan, shard)
    made = read_part(place, plan, shard)
    if made is None or made.shard != expected:
        raise DataError(
            f"{out / expected.file} is damaged and cannot be repaired: {plan.source} now gives different bytes, "
            f"because its images or the image library changed. {suggest_packing(out, dataset)}"
        )
    os.replace(place / expected.file, out / expected.file)
    sync(out)


def _write_row(
    source: Source, tar: ShardTar, plan: Plan, shard: int, row: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Add one image to the tar if it is usable; return its index row and the conversions applied."""
    file, sample = _read_sample(source, row)
    image = convert_image(sample.data, plan.resize, plan.quality)
    line = _index_row(source.name, row, sample, image) | file | {"content": hash_content(sample.data)}
    if image.verdict == "ok":
        offset = tar.add(member_key(row), image.suffix, image.data)
        line |= {"shard": shard, "offset": offset}
        line["reason"] = explain_misnamed(sample.data, sample.suffix) or None
    else:
        line["reason"] = explain_verdict(image.verdict, sample.data, sample.suffix)
    return line, image.converted


def _read_sample(source: Source, row: int) -> tuple[dict[str, Any], RawSample]:
    """Return the file of a row (path, size and time) and its sample."""
    file = NO_FILE
    with suppress(OSError):  # reading it reports the reason
        file = stat_file(source, row)
    try:
        return file, source.sample(row)
    except (DataError, OSError) as error:
        origin = source.origin(row)
        if isinstance(error, DataError) and origin in str(error):
            raise
        raise DataError(f"{origin}: {error}") from error


def _index_row(source_name: str, row: int, sample: RawSample, image: StoredImage) -> dict[str, Any]:
    """Return the index row of a sample, without a position in a shard; the caller adds that if it is usable."""
    return {
        "sample_id": row,
        "key": sample.key,
        "shard": IN_NO_SHARD,
        "offset": 0,
        "nbytes": len(image.data),
        "label": sample.label,
        "source": source_name,
        "width": image.width,
        "height": image.height,
        "verdict": image.verdict,
        "crc32": zlib.crc32(image.data),
    }
