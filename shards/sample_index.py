"""The sample index: one row per sample, with the position of its bytes, its key, label, size and verdict.

A packed split is one folder:

    shard-000000.tar ...   plain tars of <sample_id>.png / .jpg
    index.parquet          all columns, for people and other tools
    index.arrow            the numeric columns, uncompressed, memory-mapped by all ranks of a node
    rejected.parquet       rejected images, ignored files and misnamed images, each with the reason
    duplicates.parquet     images that occur more than once, grouped
    shard-000000.idx ...   for DALI's own WebDataset reader, only with --dali-index
    dataset.json           description and checksums; written last, it marks the folder as complete
"""

import hashlib
import shlex
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shards.durable import read_json, read_parquet, write_atomically, write_json, write_parquet
from shards.errors import DataError
from shards.image_check import VERDICTS

FORMAT = 2
IN_NO_SHARD = -1

TABLE = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("key", pa.string()),
        ("shard", pa.int32()),
        ("offset", pa.int64()),
        ("nbytes", pa.int64()),
        ("label", pa.int32()),
        ("source", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("verdict", pa.string()),
        ("crc32", pa.uint32()),
    ]
)

# The columns of rejected.parquet. verdict: `ok` for a usable image whose name does not tell its format. Ignored files
# have only a key, which is their path, and a reason.
REJECTED = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("key", pa.string()),
        ("verdict", pa.string()),
        ("origin", pa.string()),
        ("reason", pa.string()),
    ]
)

# The columns of index.arrow, in the order in which they are hashed.
NUMERIC: dict[str, pa.DataType] = {
    "sample_id": pa.int64(),
    "shard": pa.int32(),
    "offset": pa.int64(),
    "nbytes": pa.int64(),
    "label": pa.int32(),
    "width": pa.int32(),
    "height": pa.int32(),
    "verdict": pa.int8(),
    "crc32": pa.uint32(),
}


@dataclass(frozen=True)
class ShardFile:
    """Name, size and checksum of one shard; `samples` is the number of images in it."""

    file: str
    nbytes: int
    sha256: str
    samples: int


@dataclass(frozen=True)
class Dataset:
    """The content of dataset.json.

    listing: SHA-256 of the keys and labels that the source lists; resize: shorter side in pixels, None if images are
    not resized; quality: of re-encoded JPEGs; converted: number of images by kind of conversion (shards.image_store);
    repeated: number of images that repeat an earlier one.
    """

    source: str
    split: str
    subset: str
    class_names: tuple[str, ...]
    count: int
    usable: int
    samples_per_shard: int
    resize: int | None
    quality: int
    listing: str
    converted: dict[str, int]
    repeated: int
    index_checksum: str
    shards: tuple[ShardFile, ...]
    format: int = FORMAT

    @classmethod
    def load(cls, folder: Path) -> "Dataset":
        path = folder / "dataset.json"
        if not path.is_file():
            raise DataError(f"{path} is missing: {folder} holds no complete data set. {suggest_packing(folder)}")
        content = read_json(path)
        try:
            if content["format"] != FORMAT:
                raise DataError(
                    f"{path} has format {content['format']}; this version reads only format {FORMAT}. "
                    f"{suggest_packing(folder)}"
                )
            shards = tuple(ShardFile(**shard) for shard in content["shards"])
            if any(shard.file != shard_name(number) for number, shard in enumerate(shards)):
                raise DataError(f"{path} has shard names that incv does not write. {suggest_packing(folder)}")
            return cls(**{**content, "class_names": tuple(content["class_names"]), "shards": shards})
        except (KeyError, TypeError) as error:
            raise DataError(f"{path} was not written by incv ({error}). {suggest_packing(folder)}") from error

    def write(self, folder: Path) -> None:
        write_json(folder / "dataset.json", asdict(self))


def shard_name(shard: int) -> str:
    return f"shard-{shard:06d}.tar"


def suggest_packing(folder: Path, dataset: Dataset | None = None, repair: bool = False) -> str:
    """Return advice that ends an error message: the command that packs the folder, repairs it or packs it again."""
    place = shlex.quote(str(folder))
    if dataset is None:  # it may be partly packed: do not suggest removing it
        return f"Pack it, or run its pack command again to resume: incv shards pack SOURCE --root ROOT --out {place}"
    packing = f"incv shards pack {dataset.source}{_options(dataset)} --root ROOT --out {place}"
    if repair:
        return f"Repair the damaged shards with its pack command: {packing}"
    return f"Pack it again: rm -r {place} && {packing}"


def _options(dataset: Dataset) -> str:
    return (
        f" --split {dataset.split or repr('')}"
        + (f" --subset {dataset.subset}" if dataset.subset else "")
        + f" --classes {len(dataset.class_names)}"
        + (f" --resize {dataset.resize} --quality {dataset.quality}" if dataset.resize else "")
        + (f" --samples-per-shard {dataset.samples_per_shard}" if dataset.samples_per_shard != 1000 else "")
    )


def index_checksum(numeric: dict[str, np.ndarray], keys: pa.ChunkedArray) -> str:
    """Return the SHA-256 of the numeric columns as little-endian integers, the lengths of the keys, and the keys."""
    digest = hashlib.sha256()
    for name, kind in NUMERIC.items():
        little_endian = np.dtype(kind.to_pandas_dtype()).newbyteorder("<")
        digest.update(np.ascontiguousarray(numeric[name], dtype=little_endian).data)
    for chunk in keys.chunks:
        digest.update(pc.binary_length(chunk).to_numpy().astype("<u4").data)
    for chunk in keys.chunks:
        digest.update(_text_bytes(chunk))
    return digest.hexdigest()


def _text_bytes(chunk: pa.StringArray) -> pa.Buffer:
    """Return the concatenated UTF-8 bytes of an array of strings, without creating Python strings."""
    _, offsets, content = chunk.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[[chunk.offset, chunk.offset + len(chunk)]]
    return content[int(ends[0]) : int(ends[1])] if content is not None else pa.py_buffer(b"")


def numeric_columns(table: pa.Table) -> dict[str, np.ndarray]:
    """Return the numeric columns of an index table; the verdict becomes its position in VERDICTS."""
    codes = pc.index_in(table["verdict"], value_set=pa.array(VERDICTS))
    columns = {name: table[name] for name in NUMERIC if name != "verdict"} | {"verdict": codes}
    return {name: columns[name].cast(kind).to_numpy() for name, kind in NUMERIC.items()}


def write_index(folder: Path, table: pa.Table) -> str:
    """Write index.parquet and index.arrow; return the checksum of the index."""
    numeric = numeric_columns(table)
    arrays = [pa.array(numeric[name], kind) for name, kind in NUMERIC.items()]
    batch = pa.record_batch(arrays, schema=pa.schema(list(NUMERIC.items())))

    def write_arrow(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)  # in one batch, so that each column is contiguous

    write_parquet(folder / "index.parquet", table)
    write_atomically(folder / "index.arrow", write_arrow)
    return index_checksum(numeric, table["key"])


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """The index of a packed split: read-only arrays, memory-mapped from index.arrow and indexed by sample_id."""

    folder: Path
    dataset: Dataset
    sample_id: np.ndarray  # int64
    shard: np.ndarray  # int32; -1 if rejected
    offset: np.ndarray  # int64; of the image's first byte in its tar
    nbytes: np.ndarray  # int64
    label: np.ndarray  # int32
    width: np.ndarray  # int32; of the upright image
    height: np.ndarray  # int32; of the upright image
    verdict: np.ndarray  # int8; position in VERDICTS
    crc32: np.ndarray  # uint32; of the image's bytes

    @classmethod
    def load(cls, folder: Path) -> "SampleIndex":
        dataset = Dataset.load(folder)
        columns = _map_columns(folder / "index.arrow", dataset)
        if not (folder / "index.parquet").is_file():
            raise DataError(f"{folder / 'index.parquet'} is missing. {suggest_packing(folder, dataset)}")
        return cls(folder=folder, dataset=dataset, **columns)

    def __reduce__(self) -> Any:
        # the receiving process maps the file itself, instead of copying every column
        return SampleIndex.load, (self.folder,)

    def __len__(self) -> int:
        return self.dataset.count

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.dataset.class_names

    @property
    def num_classes(self) -> int:
        return len(self.dataset.class_names)

    @property
    def checksum(self) -> str:
        """The checksum recorded when the index was packed; `verify` recomputes it."""
        return self.dataset.index_checksum

    def usable_ids(self) -> np.ndarray:
        """Return the sample_ids that are in a shard (not rejected): int64, ascending."""
        return self.sample_id[self.verdict == 0]

    def keys(self, ids: np.ndarray | None = None) -> list[str]:
        """Return the keys (names in the source) of the samples `ids`, or of all samples."""
        column = self._key_column
        return (column if ids is None else column.take(pa.array(ids, pa.int64()))).to_pylist()

    def shard_path(self, shard: int) -> Path:
        return self.folder / self.dataset.shards[shard].file

    @cached_property
    def _key_column(self) -> pa.ChunkedArray:
        return self.read_table(["key"])["key"]

    def read_table(self, columns: list[str] | None = None) -> pa.Table:
        """Read index.parquet, or only `columns` of it."""
        path = self.folder / "index.parquet"
        try:
            table = pq.read_table(path, columns=columns, partitioning=None)
        except (OSError, pa.ArrowException) as error:
            again = suggest_packing(self.folder, self.dataset)
            raise DataError(f"{path} cannot be read ({error}). {again}") from error
        if len(table) != len(self) or table.schema.names != (columns or TABLE.names):
            again = suggest_packing(self.folder, self.dataset)
            raise DataError(f"{path} does not match {self.folder / 'dataset.json'}. {again}")
        return table

    def read_rejected(self) -> pa.Table:
        """Read rejected.parquet, with the columns of REJECTED."""
        return read_parquet(self.folder / "rejected.parquet", "list of rejected images")


def _map_columns(path: Path, dataset: Dataset) -> dict[str, np.ndarray]:
    again = suggest_packing(path.parent, dataset)
    if not path.is_file():
        raise DataError(f"{path} is missing. {again}")
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        columns = {name: table[name] for name in NUMERIC}
        if len(table) != dataset.count or any(columns[name].type != kind for name, kind in NUMERIC.items()):
            raise DataError(f"{path} does not match {path.parent / 'dataset.json'}. {again}")
        return {name: column.chunk(0).to_numpy(zero_copy_only=True) for name, column in columns.items()}
    except (OSError, KeyError, IndexError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}). {again}") from error
