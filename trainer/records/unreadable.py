"""The list of images that could not be read while a run trained or predicted; it outlives stops and kills."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shards.durable import disk_errors, write_bytes
from shards.errors import DataError
from trainer.records.run_directory import RunDirectory

if TYPE_CHECKING:  # these import torch, which a report that only reads the list need not wait for
    from trainer.loading.batch import Batches, BatchRequest, Loader
    from trainer.loading.image_set import ImageSet


@dataclass(frozen=True)
class Location:
    """What a run was doing when it met an image."""

    split: str
    """`train`, or the name of an evaluation set."""
    stage: str
    doing: str
    """`training`, `predicting`, ..."""
    round: int | None = None
    fold: int | None = None


class UnreadableLog:
    """logs/unreadable-rank<r>.jsonl: one line for each image and place, durable before its batch is used.

    A sample that is met again in the same place, after a resume or in a later epoch, is not written again.
    """

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self._path = run.unreadable(rank)
        self._lines: list[dict[str, Any]] = []
        if self._path.exists():
            content = self._path.read_bytes()
            self._lines = list(parse_complete_lines(content))
            if content.count(b"\n") != len(self._lines) or not content.endswith(b"\n"):
                write_bytes(self._path, b"".join(map(_written, self._lines)))  # without the line a kill tore

    def watch(self, data: "ImageSet", place: Location, most: float | None = None) -> "ImageSet":
        """The same samples, through a loader that writes down what it cannot read.

        most: share of the samples that may be unreadable from now on before this is an error; None: any. What
            earlier starts met is not counted: the shards may have been repaired since.
        """
        known = {_identity(line) for line in self._lines}
        ids: set[int] = set()

        def note(unreadable: list[int]) -> None:
            new = [sample for sample in unreadable if (sample, *asdict(place).values()) not in known]
            self._append(data, place, new)
            known.update((sample, *asdict(place).values()) for sample in new)
            ids.update(unreadable)
            if most is not None and len(ids) > most * len(data.ids):
                self._refuse(data, len(ids), most)

        return replace(data, loader=_WatchedLoader(data.loader, note))

    def _append(self, data: "ImageSet", place: Location, samples: list[int]) -> None:
        if not samples:
            return
        keys = data.index.keys(np.asarray(samples, np.int64))
        new = [{"sample_id": s, "key": key, **asdict(place)} for s, key in zip(samples, keys, strict=True)]
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(b"".join(map(_written, new)))
                file.flush()
                os.fsync(file.fileno())
        self._lines += new

    def _refuse(self, data: "ImageSet", count: int, most: float) -> None:
        folder = data.index.folder
        raise DataError(
            f"{count:,} of the {len(data.ids):,} training samples in {folder} could not be read, more than "
            f"data.max_unreadable = {most:.1%}: they are listed in {self._path}. Check the shards with "
            f"`incv shards verify {folder}`, and pack them again where they are damaged"
        )


class _WatchedLoader:
    """A loader that reports what it could not read, before the batch is used."""

    def __init__(self, loader: "Loader", note: Callable[[list[int]], None]) -> None:
        self._loader, self._note = loader, note

    def batches(self, requests: "Iterable[BatchRequest]") -> "Batches":
        with closing(self._loader.batches(requests)) as batches:
            for batch in batches:
                if batch.unreadable:
                    self._note(batch.unreadable)
                yield batch

    def close(self) -> None:
        self._loader.close()


def parse_complete_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The lines of such a file that were written to their end; a power cut may leave others."""
    for line in content.splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith(b"\n"):
                yield json.loads(line)


def _written(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _identity(line: dict[str, Any]) -> tuple[Any, ...]:
    return (line["sample_id"], *(line[name] for name in Location.__dataclass_fields__))
