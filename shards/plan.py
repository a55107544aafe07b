"""The packing plan, made before any image is read, and the shards that each array task packs."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shards.errors import ConfigError, DataError
from shards.sources.source import Source

_LARGEST_RESIZE = 2500  # an 8:1 image with this shorter side has 50 megapixels, the size limit of image_check
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Plan:
    """What is packed, and how. Equal plans give identical bytes, so a partly packed folder can be resumed."""

    source: str
    split: str
    subset: str
    class_names: tuple[str, ...]
    count: int
    samples_per_shard: int
    resize: int | None
    quality: int
    listing: str

    def rows(self, shard: int) -> range:
        """Return the rows of a shard, strided: sources are sorted by class, and shards should mix classes."""
        return range(shard, self.count, len(self.shards))

    @property
    def shards(self) -> range:
        return range(-(-self.count // self.samples_per_shard))

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the plan, recorded with every finished shard: shards of different plans are never merged."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Plan":
        """Parse the content of plan.json; raises KeyError or TypeError if it is not a plan."""
        return cls(**{**content, "class_names": tuple(content["class_names"])})


@dataclass(frozen=True)
class ArrayTask:
    """Task `number` (from 0) of `tasks` in an array job; it packs every `tasks`-th shard, which balances the load."""

    number: int
    tasks: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.tasks:
            raise ConfigError(f"{self}: tasks are numbered 0/N to N-1/N", field="task")

    @classmethod
    def parse(cls, text: str) -> "ArrayTask":
        number, slash, tasks = text.partition("/")
        if not (slash and number.isdecimal() and tasks.isdecimal()):
            raise ConfigError(f"{text!r} is not I/N, such as 0/16 for the first of 16 tasks", field="task")
        return cls(int(number), int(tasks))

    def __str__(self) -> str:
        return f"{self.number}/{self.tasks}"

    def shards(self, plan: Plan) -> range:
        return plan.shards[self.number :: self.tasks]


def make_plan(source: Source, samples_per_shard: int, resize: int | None, quality: int) -> Plan:
    """Make the plan from the source's keys and labels, without images; check label range and distinct keys."""
    _require_possible(samples_per_shard, resize, quality)
    if len(source) == 0:
        raise DataError(f"{source.name}/{source.split} holds no images")
    digest, hashes = hashlib.sha256(), np.empty(len(source), dtype=np.int64)
    for first, lines, keys in _list_rows(source):
        digest.update("".join(lines).encode())
        hashes[first : first + len(keys)] = [hash(key) for key in keys]
    _require_distinct(source, hashes)
    return Plan(
        source=source.name,
        split=source.split,
        subset=source.subset,
        class_names=source.class_names,
        count=len(source),
        samples_per_shard=samples_per_shard,
        resize=resize,
        quality=quality,
        listing=digest.hexdigest(),
    )


def _require_possible(samples_per_shard: int, resize: int | None, quality: int) -> None:
    if samples_per_shard < 1:
        raise ConfigError(f"must be 1 or more, not {samples_per_shard}", field="samples_per_shard")
    if resize is not None and not 1 <= resize <= _LARGEST_RESIZE:
        raise ConfigError(f"the shorter side in pixels must be 1 to {_LARGEST_RESIZE}, not {resize}", field="resize")
    if not 1 <= quality <= 100:
        raise ConfigError(f"the JPEG quality must be 1 to 100, not {quality}", field="quality")


def _list_rows(source: Source) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield (first row, lines of the listing, keys) for a few thousand rows at a time, to limit memory."""
    classes = len(source.class_names)
    for first in range(0, len(source), _ROWS_AT_ONCE):
        lines, keys = [], []
        for row in range(first, min(first + _ROWS_AT_ONCE, len(source))):
            key, label = source.key(row), source.label(row)
            if not 0 <= label < classes:
                raise DataError(f"{key} has label {label}; the labels of {source.name} are 0..{classes - 1}")
            keys.append(key)
            lines.append(f"{len(key)} {key} {label}\n")
        yield first, lines, keys


def _require_distinct(source: Source, hashes: np.ndarray) -> None:
    """Raise DataError if a key occurs twice. hashes: of all keys; only the keys of equal hashes are compared."""
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    suspects = sorted({int(row) for place in same for row in order[place : place + 2]})
    rows: dict[str, int] = {}
    for row in suspects:
        key = source.key(row)
        first = rows.setdefault(key, row)
        if first != row:
            raise DataError(
                f"two images of {source.name} have the key {key}: {source.origin(first)} and {source.origin(row)}. "
                "Rename or remove one of them"
            )
