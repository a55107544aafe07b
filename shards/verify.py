"""Recounting and re-checksumming a packed split, and remembering that it was done."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from shards.dali_index import index_path, index_text
from shards.durable import read_json, read_parquet, write_json
from shards.errors import DataError
from shards.image_check import VERDICTS
from shards.progress import Progress
from shards.sample_index import (
    IN_NO_SHARD,
    NUMERIC,
    Dataset,
    SampleIndex,
    index_checksum,
    numeric_columns,
    pack_again,
)
from shards.shard_writer import member_key
from shards.tar_stream import Member, read_tar

_PROBLEMS_PER_SHARD = 5
_PROBLEMS_SHOWN = 3
_NOTE = ".verified.json"


@dataclass(frozen=True)
class VerifyReport:
    """What a full check found; no problems means that every byte is the one that was packed."""

    samples: int
    shards: int
    problems: list[str] = field(default_factory=list)
    tables_are_good: bool = True
    """Whether the index and the tables beside it are as packed: then the shards can be mended."""


def verify(folder: Path, workers: int = 1) -> VerifyReport:
    """Read everything in `folder` again; remember a good result for `require_verified`."""
    before = _file_stamps(folder)
    try:
        index = SampleIndex.load(folder)
        problems = list(index_problems(index))
    except DataError as error:
        return VerifyReport(0, 0, [str(error)], tables_are_good=False)
    tables_are_good = not problems
    shards = index.dataset.shards
    with_dali = any(index_path(index.shard_path(shard)).exists() for shard in range(len(shards)))
    # threads are enough: nearly all is reading and hashing, which leave the interpreter free
    with Progress("verify", len(index)) as progress, ThreadPoolExecutor(workers) as pool:
        for found in pool.map(lambda shard: list(_shard_problems(index, shard, with_dali)), range(len(shards))):
            problems += found[:_PROBLEMS_PER_SHARD]
            if len(found) > _PROBLEMS_PER_SHARD:
                problems.append(f"... and {len(found) - _PROBLEMS_PER_SHARD} more in that shard")
            progress.advance(min(index.dataset.samples_per_shard, len(index) - progress.done))
    if not problems:
        note_good(folder, before)
    return VerifyReport(len(index), len(shards), problems, tables_are_good)


def note_good(folder: Path, stamps: dict[str, list[int]] | None = None) -> None:
    """Remember that the files, as they now are or as `stamps` says they were, are those that were packed."""
    with suppress(DataError, OSError):  # a read-only folder: it is checked again next time
        write_json(folder / _NOTE, stamps if stamps is not None else _file_stamps(folder))


def require_verified(folder: Path, workers: int = 1) -> SampleIndex:
    """The index of `folder`, after a full check unless no file has changed since the last good one."""
    index = SampleIndex.load(folder)
    if not is_noted_good(folder):
        report = verify(folder, workers)
        problems = report.problems
        if problems:
            again = pack_again(folder, index.dataset, mend=report.tables_are_good)
            shown = "; ".join(problem.removesuffix(f". {again}") for problem in problems[:_PROBLEMS_SHOWN])
            more = f" and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
            raise DataError(f"{folder} is damaged: {shown}{more}. {again}")
    return index


def is_noted_good(folder: Path) -> bool:
    """Whether no file has changed since the last good check."""
    return _noted(folder) == _file_stamps(folder)


def _noted(folder: Path) -> object:
    with suppress(DataError, OSError):
        return read_json(folder / _NOTE)
    return None


def _file_stamps(folder: Path) -> dict[str, list[int]]:
    """Size and time of change of every file that was packed; a file not there is left out."""
    with suppress(DataError):
        names = ["dataset.json", "index.parquet", "index.arrow", "rejected.parquet", "duplicates.parquet"]
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
    """What is wrong with the tables, each alone and held against the others and dataset.json."""
    rejected = read_parquet(index.folder / "rejected.parquet", "list of rejected images").num_rows
    read_parquet(index.folder / "duplicates.parquet", "list of repeated images")
    if rejected != index.dataset.count - index.dataset.usable:
        yield "rejected.parquet does not belong to dataset.json"
    table = index.read_table()
    keys = table["key"]
    mapped = {name: getattr(index, name) for name in NUMERIC}
    if index_checksum(mapped, keys) != index.checksum:
        yield "index.arrow or the keys in index.parquet changed since they were packed (checksum)"
    if any(not np.array_equal(column, mapped[name]) for name, column in numeric_columns(table).items()):
        yield "index.parquet and index.arrow do not say the same"
    if not np.array_equal(index.sample_id, np.arange(len(index))):
        yield "the sample ids of the index are not 0..n-1"
    if pc.count_distinct(keys).as_py() != len(keys):
        yield "the index has a key twice"
    usable = len(index.usable_ids())
    if usable != index.dataset.usable:
        yield f"the index has {usable:,} usable samples, dataset.json {index.dataset.usable:,}"
    if np.any((index.shard == IN_NO_SHARD) != (index.verdict != VERDICTS.index("ok"))):
        yield "the index has a rejected sample in a shard, or a usable one in none"
    if np.any(index.shard >= len(index.dataset.shards)):
        yield "the index names a shard that is not in dataset.json"
    yield from _resize_problems(index)


def _resize_problems(index: SampleIndex) -> Iterator[str]:
    """By the sizes in the index: cheap, and what a wrong setting of a recipe would show first."""
    resize = index.dataset.resize
    if resize is None:
        return
    wrong = np.flatnonzero((index.verdict == 0) & (np.minimum(index.width, index.height) != resize))
    if len(wrong):
        first = int(wrong[0])
        yield (
            f"{len(wrong):,} images whose shorter side is not {resize}: {_called(index, first)}, "
            f"{index.width[first]} x {index.height[first]}"
        )


def _shard_problems(index: SampleIndex, shard: int, with_dali: bool) -> Iterator[str]:
    facts, path = index.dataset.shards[shard], index.shard_path(shard)
    if not path.is_file():
        yield f"{facts.file} is missing"
        return
    try:
        content = read_tar(path)
        nbytes = path.stat().st_size
    except OSError as error:
        yield f"{facts.file} cannot be read: {error.strerror}"
        return
    if nbytes != facts.nbytes:
        yield f"{facts.file} has {nbytes:,} bytes, {facts.nbytes:,} were packed"
    elif content.sha256 != facts.sha256:
        yield f"{facts.file} changed since it was packed (SHA-256)"
    if not content.is_whole:
        yield f"{facts.file} is not a plain tar behind its member {len(content.members):,}"
    yield from _member_problems(index, shard, content.members)
    if with_dali and content.members:
        yield from _dali_problems(path, content.members)


def _member_problems(index: SampleIndex, shard: int, members: list[Member]) -> Iterator[str]:
    """The tar's members held against the rows of the index, in order."""
    facts = index.dataset.shards[shard]
    ids = np.flatnonzero(index.shard == shard)
    if len(ids) != facts.samples:
        yield f"{facts.file}: the index has {len(ids):,} samples, dataset.json {facts.samples:,}"
    if len(members) != len(ids):
        yield f"{facts.file} has {len(members):,} members, the index {len(ids):,}"
    for member, row in zip(members, ids, strict=False):
        sample = int(row)
        expected = (member_key(sample), index.offset[sample], index.nbytes[sample])
        if (Path(member.name).stem, member.offset, member.nbytes) != expected:
            yield f"{facts.file}: {member.name} at {member.offset:,} is not {_called(index, sample)} of the index"
        elif member.crc32 != index.crc32[sample]:
            yield f"{facts.file}: the bytes of {_called(index, sample)} changed (CRC-32)"


def _dali_problems(tar: Path, members: list[Member]) -> Iterator[str]:
    """DALI itself reads whatever lies at a wrong offset."""
    path = index_path(tar)
    if not path.is_file():
        yield f"{path.name} is missing beside the others; --dali-index mends it"
    elif path.read_text(errors="replace") != index_text((one.name, one.offset, one.nbytes) for one in members):
        yield f"{path.name} does not say what {tar.name} holds; --dali-index mends it"


def _called(index: SampleIndex, sample: int) -> str:
    return f"sample {sample} ({index.keys(np.array([sample]))[0]})"
