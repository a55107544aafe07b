"""Synthetic sample indexes of any size, like those of packed web images, with shards of random bytes."""

import hashlib
import os
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shards.image_check import VERDICTS
from shards.sample_index import IN_NO_SHARD, TABLE, Dataset, ShardFile, shard_name, write_index

SAMPLES_PER_SHARD = 1000
MEAN_BYTES = 30_000  # a web image of shorter side 256, JPEG quality 90
_CLASSES, _QUERIES = 1000, 1632
_REJECTED = 0.002
_TAR_BLOCK = 512


def make_index(folder: Path, rows: int, with_shards: bool = False) -> None:
    """Write dataset.json, index.arrow and index.parquet of `rows` samples, and shards of noise if wanted."""
    random = np.random.default_rng(0)
    table = _table(rows, random)
    shard, nbytes = table["shard"].to_numpy(), table["nbytes"].to_numpy()
    stored = shard != IN_NO_SHARD
    samples = np.bincount(shard[stored], minlength=-(-rows // SAMPLES_PER_SHARD))
    sizes = np.bincount(shard[stored], _in_tar(nbytes[stored]), len(samples)).astype(np.int64)
    folder.mkdir(parents=True)
    if with_shards:
        crc32 = _write_shards(folder, table, sizes, random)
        table = table.set_column(TABLE.get_field_index("crc32"), "crc32", pa.array(crc32))
    checksum = write_index(folder, table)
    _dataset(rows, samples, sizes, checksum).write(folder)


def _write_shards(folder: Path, table: pa.Table, sizes: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Files of the tars' sizes; uint32 [rows], the CRC-32 of what lies where each sample should."""
    shard, offset, nbytes = (table[name].to_numpy() for name in ("shard", "offset", "nbytes"))
    crc32 = np.zeros(len(table), np.uint32)
    for number, size in enumerate(sizes):
        content = memoryview(random.bytes(int(size)))
        with (folder / shard_name(number)).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # only what is on the disk can be dropped from memory
        for row in np.flatnonzero(shard == number):
            crc32[row] = zlib.crc32(content[offset[row] : offset[row] + nbytes[row]])
    return crc32


def _dataset(rows: int, samples: np.ndarray, sizes: np.ndarray, checksum: str) -> Dataset:
    """samples, sizes: int64 [shards]."""
    shards = tuple(
        ShardFile(shard_name(number), int(size), hashlib.sha256(str(number).encode()).hexdigest(), int(count))
        for number, (count, size) in enumerate(zip(samples, sizes, strict=True))
    )
    return Dataset(
        source="webvision",
        split="train",
        subset="all",
        class_names=tuple(f"n{10_000_000 + label} class {label}, made up" for label in range(_CLASSES)),
        count=rows,
        usable=int(samples.sum()),
        samples_per_shard=SAMPLES_PER_SHARD,
        resize=256,
        quality=90,
        listing="0" * 64,
        converted={},
        repeated=0,
        index_checksum=checksum,
        shards=shards,
    )


def _in_tar(nbytes: np.ndarray) -> np.ndarray:
    """Header, data and padding."""
    return _TAR_BLOCK + -(-nbytes // _TAR_BLOCK) * _TAR_BLOCK


def _table(rows: int, random: np.random.Generator) -> pa.Table:
    good = random.random(rows) >= _REJECTED
    nbytes = np.clip(random.lognormal(np.log(MEAN_BYTES), 0.4, rows), 2_000, 2_000_000).astype(np.int64)
    shard = np.arange(rows) // SAMPLES_PER_SHARD
    ends = np.cumsum(np.where(good, _in_tar(nbytes), 0))
    before = np.concatenate([[0], ends[SAMPLES_PER_SHARD - 1 :: SAMPLES_PER_SHARD]])[shard]
    offset = ends - _in_tar(nbytes) - before + _TAR_BLOCK
    label = np.arange(rows) * _CLASSES // max(rows, 1)
    side = random.integers(256, 460, (2, rows))
    side[random.integers(0, 2, rows), np.arange(rows)] = 256
    columns = {
        "sample_id": np.arange(rows),
        "key": _keys(rows, random),
        "shard": np.where(good, shard, IN_NO_SHARD),
        "offset": np.where(good, offset, 0),
        "nbytes": np.where(good, nbytes, 0),
        "label": label,
        "source": pa.array(["webvision"]).take(pa.array(np.zeros(rows, np.int64))),
        "width": side[0],
        "height": side[1],
        "verdict": pa.array(VERDICTS).take(pa.array(np.where(good, 0, 1))),
        "crc32": random.integers(0, 2**32, rows, dtype=np.uint32),
    }
    return pa.table({name: pa.chunked_array([_column(columns[name], name)]) for name in TABLE.names}, schema=TABLE)


def _column(values: np.ndarray | pa.Array, name: str) -> pa.Array:
    return pa.array(values).cast(TABLE.field(name).type)


def _keys(rows: int, random: np.random.Generator) -> pa.Array:
    """Names as long as real ones, google/q0001/81234567890123; the row inside makes each unique."""
    query = pa.array(np.arange(rows) * _QUERIES // max(rows, 1) + 10_001).cast(pa.string())
    name = pa.array(np.arange(rows) * 1_000_000 + random.integers(0, 1_000_000, rows) + 10**13).cast(pa.string())
    return pc.binary_join_element_wise(pc.replace_substring(query, "1", "google/q", max_replacements=1), name, "/")
