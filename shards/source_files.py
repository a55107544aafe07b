"""Records the files that a split was packed from, and finds out what has changed in them since."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from shards.durable import read_parquet, write_parquet
from shards.errors import DataError, list_some
from shards.sample_index import Dataset, SampleIndex, suggest_packing
from shards.sources.source import FileSource, FirstClasses, Source

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

_ROOT, _FIRST_CLASSES = b"incv.root", b"incv.first_classes"


@dataclass(frozen=True)
class Changes:
    """How the files of a source differ from those that were packed, by key; true if they differ at all."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Files with other content."""
    relabelled: tuple[str, ...] = ()
    """Files in another class, under the same key."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.relabelled)

    def describe(self) -> str:
        """Return the number of files of each kind, with a few names."""
        kinds = {
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "given another label": self.relabelled,
        }
        texts = [f"{_count(names)} {kind} ({list_some(names)})" for kind, names in kinds.items() if names]
        return ", ".join(texts) or "no file differs"


def _count(names: tuple[str, ...]) -> str:
    return "1 file" if len(names) == 1 else f"{len(names):,} files"


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
    """Read the record of a packed folder; None if not every sample is a file of its own."""
    path = folder / SOURCE_FILES
    if not path.is_file():
        return None
    table = read_parquet(path, "list of source files")
    facts = table.schema.metadata or {}
    if table.schema.names != [field.name for field in FILE_COLUMNS] or len(table) != dataset.count:
        raise DataError(f"{path} does not match {folder / 'dataset.json'}. {suggest_packing(folder, dataset)}")
    classes = facts.get(_FIRST_CLASSES)
    return SourceFiles(facts.get(_ROOT, b"").decode(), None if classes is None else int(classes), table)


def find_changes(source: Source, index: SampleIndex, recorded: SourceFiles) -> Changes:
    """Compare the files that `source` lists now with those that were packed, by key."""
    rows = {source.key(row): row for row in range(len(source))}
    packed = {key: sample for sample, key in enumerate(index.keys())}
    both = [(key, sample, rows[key]) for key, sample in packed.items() if key in rows]
    return Changes(
        added=tuple(key for key in rows if key not in packed),
        removed=tuple(key for key in packed if key not in rows),
        changed=_find_changed(source, recorded, both),
        relabelled=tuple(
            key
            for key, sample, row in both
            if index.class_names[index.label[sample]] != source.class_names[source.label(row)]
        ),
    )


def _find_changed(source: Source, recorded: SourceFiles, both: list[tuple[str, int, int]]) -> tuple[str, ...]:
    """Return the keys of files with other content. both: (key, row of the record, row of the source)."""
    before = recorded.table.to_pylist()

    def has_changed(sample: int, row: int) -> bool:
        content = before[sample].pop("content")
        try:
            found = stat_file(source, row)
            if found == before[sample]:
                return False
            same_size = found["file_nbytes"] == before[sample]["file_nbytes"]
            return not same_size or hash_content(source.sample(row).data) != content
        except (DataError, OSError):  # it vanished after it was listed
            return True

    return tuple(key for key, sample, row in both if has_changed(sample, row))
