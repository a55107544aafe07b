"""Records the files that a split was packed from, and finds out what has changed in them since."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError
from shards.file_changes import Changes, FoundFile, PackedFile, compare_files
from shards.sample_index import Dataset, SampleIndex, suggest_packing
from shards.sources.first_classes import FirstClasses
from shards.sources.source import FileSource, Source

SOURCE_FILES: Final = "source_files.parquet"
MOST_COMPARED: Final = 200_000
"""A larger source is compared on request only: listing a million files on network storage takes minutes."""
CONTENT_BYTES: Final = 16

FILE_COLUMNS: Final = (
    pa.field("path", pa.string()),
    pa.field("file_nbytes", pa.int64()),
    pa.field("mtime_ns", pa.int64()),
    pa.field("content", pa.binary(CONTENT_BYTES)),
)
"""The columns of a shard's table that describe the source file of each sample; without files, only `content`."""
NO_FILE: Final[dict[str, Any]] = {"path": None, "file_nbytes": None, "mtime_ns": None}

_SEEN_TIMES = ".source_times.parquet"  # modification times at which the files were last found to be unchanged
_ROOT, _FIRST_CLASSES = b"incv.root", b"incv.first_classes"


@dataclass(frozen=True)
class SourceFiles:
    """The content of source_files.parquet: one row per sample, in the order of the index."""

    root: str
    first_classes: int | None
    """If only the first classes of the source were packed, their number."""
    table: pa.Table


def hash_content(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CONTENT_BYTES]


def stat_file(source: Source, row: int) -> dict[str, Any]:
    """Return path, size and modification time of a row's file; NO_FILE if the row has no file of its own.

    Call it before reading the file: if the file changes in between, the recorded time is the older one.
    """
    if not isinstance(source, FileSource) or (path := source.file(row)) is None:
        return NO_FILE
    status, root = path.stat(), source.root
    name = os.fspath(path)
    if root is not None and path.is_relative_to(root):
        name = path.relative_to(root).as_posix()
    return {"path": name, "file_nbytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def is_unchanged(source: Source, table: pa.Table) -> bool:
    """Whether no file of a shard's table has changed in size or time. table: with `sample_id` and FILE_COLUMNS."""
    if not isinstance(source, FileSource):
        return True
    recorded = table.select(["sample_id", *NO_FILE]).to_pylist()
    try:
        return all(stat_file(source, one.pop("sample_id")) == one for one in recorded)
    except OSError:
        return False


def write_source_files(source: Source, out: Path, table: pa.Table) -> None:
    """Write the record of the files, if every sample has one. table: all rows, with FILE_COLUMNS, in order."""
    if not isinstance(source, FileSource) or source.root is None or table["path"].null_count:
        return
    facts = {_ROOT: str(source.root).encode()}
    if isinstance(source, FirstClasses):
        facts[_FIRST_CLASSES] = str(len(source.class_names)).encode()
    columns = table.select([field.name for field in FILE_COLUMNS])
    write_parquet(out / SOURCE_FILES, columns.replace_schema_metadata(facts))


def read_source_files(folder: Path, dataset: Dataset) -> SourceFiles | None:
    """Read the record of a packed folder; None if it has none: no files, or packed by an earlier version."""
    path = folder / SOURCE_FILES
    if not path.is_file():
        return None
    table = read_parquet(path, "list of source files")
    facts = table.schema.metadata or {}
    if table.schema.names != [field.name for field in FILE_COLUMNS] or len(table) != dataset.count:
        raise DataError(f"{path} does not match {folder / 'dataset.json'}. {suggest_packing(folder, dataset)}")
    classes = facts.get(_FIRST_CLASSES)
    return SourceFiles(facts.get(_ROOT, b"").decode(), None if classes is None else int(classes), table)


def find_changes(source: Source, index: SampleIndex, recorded: SourceFiles | None, remember: bool = True) -> Changes:
    """Compare the files that `source` lists now with those that were packed; without a record, only keys and labels.

    remember: note the new times of touched files in the folder, so that the next call need not read them again.
    """
    rows = {source.key(row): row for row in range(len(source))}
    found = {key: file for key, row in rows.items() if (file := _find_file(source, row)) is not None}
    if recorded is None:
        found = {key: FoundFile("", 0, 0, file.label) for key, file in found.items()}

    def hash_found(key: str) -> bytes:
        with suppress(DataError, OSError):
            return hash_content(source.sample(rows[key]).data)
        return b""

    seen = _read_seen_times(index)
    changes = compare_files(_list_packed(index, recorded, seen), found, hash_found)
    if remember and changes.touched and not changes:
        _note_times(index, seen, {key: found[key].mtime_ns for key in changes.touched})
    return changes


def _find_file(source: Source, row: int) -> FoundFile | None:
    label = source.class_names[source.label(row)]
    try:
        file = stat_file(source, row)
    except OSError:  # it vanished after it was listed
        return None
    if file["path"] is None:
        return FoundFile("", 0, 0, label)
    return FoundFile(file["path"], file["file_nbytes"], file["mtime_ns"], label)


def _list_packed(index: SampleIndex, recorded: SourceFiles | None, seen: np.ndarray | None) -> dict[str, PackedFile]:
    keys, labels = index.keys(), [index.class_names[label] for label in index.label]
    if recorded is None:
        return {key: PackedFile("", 0, (0,), b"", label) for key, label in zip(keys, labels, strict=True)}
    columns = [recorded.table[field.name].to_pylist() for field in FILE_COLUMNS]
    again = columns[2] if seen is None else seen.tolist()
    return {
        key: PackedFile(path, nbytes, (time, later), content, label)
        for key, path, nbytes, time, content, later, label in zip(keys, *columns, again, labels, strict=True)
    }


def _read_seen_times(index: SampleIndex) -> np.ndarray | None:
    with suppress(DataError, KeyError):
        times: np.ndarray = read_parquet(index.folder / _SEEN_TIMES, "list of times")["mtime_ns"].to_numpy()
        return times if len(times) == len(index) else None
    return None


def _note_times(index: SampleIndex, seen: np.ndarray | None, touched: Mapping[str, int]) -> None:
    before = np.full(len(index), -1, np.int64) if seen is None else seen
    times = [touched.get(key, int(time)) for key, time in zip(index.keys(), before, strict=True)]
    with suppress(DataError, OSError):  # in a read-only folder, touched files are read again next time
        write_parquet(index.folder / _SEEN_TIMES, pa.table({"mtime_ns": pa.array(times, pa.int64())}))
