"""Verifies a packed split by counts and checksums, and records the result."""

import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from shards.dali_index import index_path, index_text
from shards.durable import hash_file, read_json, read_parquet, write_json
from shards.errors import DataError, list_some
from shards.image_check import MAX_BYTES, VERDICTS
from shards.progress import Progress
from shards.sample_index import (
    IN_NO_SHARD,
    NUMERIC,
    Dataset,
    SampleIndex,
    index_checksum,
    numeric_columns,
    suggest_packing,
)
from shards.shard_writer import member_key
from shards.source_files import SOURCE_FILES, read_source_files
from shards.sources.tar_members import Member, list_members

_PROBLEMS_PER_SHARD = 5
_NOTE = ".verified.json"


@dataclass(frozen=True)
class VerifyReport:
    """Result of a full check; if there are no problems, no byte has changed since packing."""

    samples: int
    shards: int
    problems: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    """The numbers of the shards that are missing or whose bytes have changed."""
    tables_are_good: bool = True
    """Whether the index and the other tables are undamaged; if so, damaged shards can be repaired."""


def verify(folder: Path, workers: int = 1) -> VerifyReport:
    """Read and check every file of `folder`. If all are intact, record that, so that later checks can skip them."""
    before = _file_stamps(folder)
    try:
        index = SampleIndex.load(folder)
        problems = list(index_problems(index))
    except DataError as error:
        return VerifyReport(0, 0, [str(error)], tables_are_good=False)
    tables_are_good = not problems
    damaged = []
    shards = index.dataset.shards
    with_dali = any(index_path(index.shard_path(shard)).exists() for shard in range(len(shards)))
    # threads suffice: reading and hashing release the GIL
    with Progress("verify", len(index)) as progress, ThreadPoolExecutor(workers) as pool:
        checks = pool.map(lambda shard: list(_shard_problems(index, shard)), range(len(shards)))
        for shard, found in enumerate(checks):
            if found:
                damaged.append(shard)
            elif with_dali:
                found = list(_dali_problems(index, shard))
            problems += found[:_PROBLEMS_PER_SHARD]
            if len(found) > _PROBLEMS_PER_SHARD:
                problems.append(f"... and {len(found) - _PROBLEMS_PER_SHARD} more problems in that shard")
            progress.advance(min(index.dataset.samples_per_shard, len(index) - progress.done))
    if not problems:
        mark_verified(folder, before)
    return VerifyReport(len(index), len(shards), problems, damaged, tables_are_good)


def mark_verified(folder: Path, stamps: dict[str, list[int]] | None = None) -> None:
    """Record that the files are verified. stamps: their sizes and mtimes before they were read; None: as of now."""
    with suppress(DataError, OSError):  # a read-only folder is verified again next time
        write_json(folder / _NOTE, stamps if stamps is not None else _file_stamps(folder))


def require_verified(folder: Path, workers: int = 1) -> SampleIndex:
    """Load the index of `folder`; verify all files first if any has changed since the last verification."""
    index = SampleIndex.load(folder)
    if not is_marked_verified(folder):
        report = verify(folder, workers)
        problems = report.problems
        if problems:
            again = suggest_packing(folder, index.dataset, repair=report.tables_are_good)
            shown = list_some([one.removesuffix(f". {again}") for one in problems], separator="; ")
            raise DataError(f"{folder} is damaged: {shown}. {again}")
    return index


def is_marked_verified(folder: Path) -> bool:
    """Whether the folder was verified and no file has changed since."""
    return _read_mark(folder) == _file_stamps(folder)


def _read_mark(folder: Path) -> object:
    with suppress(DataError, OSError):
        return read_json(folder / _NOTE)
    return None


def _file_stamps(folder: Path) -> dict[str, list[int]]:
    """Return [size, mtime in ns] of every packed file that exists, by name."""
    with suppress(DataError):
        names = ["dataset.json", "index.parquet", "index.arrow", "rejected.parquet", "duplicates.parquet"]
        names.append(SOURCE_FILES)
        shards = [shard.file for shard in Dataset.load(folder).shards]
        names += shards + [index_path(Path(shard)).name for shard in shards]
        stamps = {}
        for name in names:
            with suppress(FileNotFoundError):
                status = (folder / name).stat()
                stamps[name] = [status.st_size, status.st_mtime_ns]
        return stamps
    return {}


def index_problems(index: SampleIndex) -> Iterator[str]:
    """Yield the problems of the tables: unreadable ones, and differences between them and dataset.json."""
    table = read_parquet(index.folder / "rejected.parquet", "list of rejected images")
    verdicts = table["verdict"].to_pylist() if "verdict" in table.schema.names else []
    read_parquet(index.folder / "duplicates.parquet", "list of repeated images")
    read_source_files(index.folder, index.dataset)
    if sum(verdict not in (None, "ok") for verdict in verdicts) != index.dataset.count - index.dataset.usable:
        yield "rejected.parquet does not match dataset.json"
    table = index.read_table()
    keys = table["key"]
    mapped = {name: getattr(index, name) for name in NUMERIC}
    if index_checksum(mapped, keys) != index.checksum:
        yield "index.arrow or the keys in index.parquet have changed since packing (checksum)"
    if any(not np.array_equal(column, mapped[name]) for name, column in numeric_columns(table).items()):
        yield "index.parquet and index.arrow differ"
    if not np.array_equal(index.sample_id, np.arange(len(index))):
        yield "the sample ids of the index are not 0..n-1"
    if pc.count_distinct(keys).as_py() != len(keys):
        yield "a key occurs twice in the index"
    usable = len(index.usable_ids())
    if usable != index.dataset.usable:
        yield f"the index has {usable:,} usable samples, but dataset.json records {index.dataset.usable:,}"
    if np.any((index.shard == IN_NO_SHARD) != (index.verdict != VERDICTS.index("ok"))):
        yield "the index places a rejected sample in a shard, or a usable sample in none"
    if np.any(index.shard >= len(index.dataset.shards)):
        yield "the index names a shard that is not in dataset.json"
    yield from _resize_problems(index)


def _resize_problems(index: SampleIndex) -> Iterator[str]:
    """Yield a problem if the index lists images of the wrong size; a cheap check that needs no shard."""
    resize = index.dataset.resize
    if resize is None:
        return
    wrong = np.flatnonzero((index.verdict == 0) & (np.minimum(index.width, index.height) != resize))
    if len(wrong):
        first = int(wrong[0])
        yield (
            f"{len(wrong):,} images have a shorter side other than {resize} pixels, for example "
            f"{_describe_sample(index, first)}: {index.width[first]} x {index.height[first]}"
        )


def _shard_problems(index: SampleIndex, shard: int) -> Iterator[str]:
    facts, path = index.dataset.shards[shard], index.shard_path(shard)
    if not path.is_file():
        yield f"{facts.file} is missing"
        return
    try:
        nbytes = path.stat().st_size
        if nbytes != facts.nbytes:
            yield f"{facts.file} has {nbytes:,} bytes instead of {facts.nbytes:,}"
        elif hash_file(path) != facts.sha256:
            yield f"{facts.file} has changed since packing (SHA-256)"
        yield from _member_problems(index, shard, list(list_members(path, show_progress=False)))
    except OSError as error:
        yield f"{facts.file} cannot be read: {error.strerror}"
    except DataError:
        yield f"{facts.file} is not a valid tar"


def _member_problems(index: SampleIndex, shard: int, members: list[Member]) -> Iterator[str]:
    """Yield the differences between the members of a tar and the rows of the index."""
    facts = index.dataset.shards[shard]
    ids = np.flatnonzero(index.shard == shard)
    if len(ids) != facts.samples:
        yield f"{facts.file}: the index lists {len(ids):,} samples, but dataset.json records {facts.samples:,}"
    if len(members) != len(ids):
        yield f"{facts.file} has {len(members):,} members, but the index lists {len(ids):,}"
    with index.shard_path(shard).open("rb") as file:
        for member, row in zip(members, ids, strict=False):
            sample = int(row)
            expected = (member_key(sample), index.offset[sample], index.nbytes[sample])
            if (Path(member.name).stem, member.offset, member.nbytes) != expected:
                wanted = _describe_sample(index, sample)
                yield f"{facts.file}: the index expects {wanted}, but {member.name} is at byte {member.offset:,}"
                continue
            data = os.pread(file.fileno(), min(member.nbytes, MAX_BYTES), member.offset)
            if zlib.crc32(data) != index.crc32[sample]:
                yield f"{facts.file}: the bytes of {_describe_sample(index, sample)} have changed (CRC-32)"


def _dali_problems(index: SampleIndex, shard: int) -> Iterator[str]:
    """Check the .idx file of an intact shard, if it needs one: DALI would not notice a wrong offset."""
    tar = index.shard_path(shard)
    path = index_path(tar)
    if not index.dataset.shards[shard].samples:
        return
    if not path.is_file():
        yield f"{path.name} is missing while other index files exist; `incv shards pack --dali-index` rewrites it"
    elif path.read_text(errors="replace") != index_text(index, shard):
        yield f"{path.name} does not match {tar.name}; `incv shards pack --dali-index` rewrites it"


def _describe_sample(index: SampleIndex, sample: int) -> str:
    return f"sample {sample} ({index.keys(np.array([sample]))[0]})"
