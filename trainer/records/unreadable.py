"""Logs the images that could not be read during training or prediction; the log survives stops and kills."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shards.durable import disk_errors, write_bytes
from shards.errors import DataError
from shards.regular_file import open_to_append
from trainer.records.run_directory import RunDirectory

if TYPE_CHECKING:  # slow, because they import torch; not needed to read the log
    from trainer.loading.batch import Batches, BatchRequest, Loader
    from trainer.loading.image_set import ImageSet


@dataclass(frozen=True)
class Location:
    """Where in a run an image was read."""

    split: str
    """`train`, or the name of an evaluation set."""
    stage: str
    doing: str
    """`training`, `predicting`, ..."""
    round: int | None = None
    fold: int | None = None


class UnreadableLog:
    """Writes logs/unreadable-rank<r>.jsonl: one line per image and location, durable before the batch is used.

    A sample that fails again in the same location, in a later epoch or after a resume, is not logged again.
    """

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self._path = run.unreadable(rank)
        self._lines: list[dict[str, Any]] = []
        if self._path.exists():
            content = self._path.read_bytes()
            self._lines = list(parse_complete_lines(content))
            if content.count(b"\n") != len(self._lines) or not content.endswith(b"\n"):
                write_bytes(self._path, b"".join(map(_encode_line, self._lines)))  # drop lines truncated by a kill

    def watch(self, data: "ImageSet", location: Location, max_share: float | None = None) -> "ImageSet":
        """Return the same image set with a loader that logs unreadable samples.

        max_share: raise DataError if more than this fraction of the samples is unreadable; None: no limit. Failures
            in earlier starts do not count, because the shards may have been repaired since.
        """
        logged = {_identity(line) for line in self._lines}
        failed: set[int] = set()

        def record(unreadable: list[int]) -> None:
            new = [sample for sample in unreadable if (sample, *asdict(location).values()) not in logged]
            self._append(data, location, new)
            logged.update((sample, *asdict(location).values()) for sample in new)
            failed.update(unreadable)
            if max_share is not None and len(failed) > max_share * len(data.ids):
                self._raise_too_many(data, len(failed), max_share)

        return replace(data, loader=_WatchedLoader(data.loader, record))

    def adopt(self, lines: Iterable[dict[str, Any]]) -> None:
        """Add the lines of another run's logs, each once; a repeated call adds nothing."""
        known = {_identity(line): line for line in self._lines}
        every = known | {_identity(line): line for line in lines if _identity(line) not in known}
        if len(every) > len(known):
            self._lines = list(every.values())
            write_bytes(self._path, b"".join(map(_encode_line, self._lines)))

    def _append(self, data: "ImageSet", location: Location, samples: list[int]) -> None:
        if not samples:
            return
        keys = data.index.keys(np.asarray(samples, np.int64))
        new = [{"sample_id": s, "key": key, **asdict(location)} for s, key in zip(samples, keys, strict=True)]
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self._path) as file:
                file.write(b"".join(map(_encode_line, new)))
                file.flush()
                os.fsync(file.fileno())
        self._lines += new

    def _raise_too_many(self, data: "ImageSet", count: int, max_share: float) -> None:
        folder = data.index.folder
        raise DataError(
            f"{count:,} of the {len(data.ids):,} training samples in {folder} could not be read, more than "
            f"data.max_unreadable = {max_share:.1%} allows; they are listed in {self._path}. Check the shards with "
            f"`incv shards verify {folder}`, and pack damaged ones again"
        )


class _WatchedLoader:
    """Wraps a loader and records the unreadable samples of a batch before yielding it."""

    def __init__(self, loader: "Loader", record: Callable[[list[int]], None]) -> None:
        self._loader, self._record = loader, record

    def batches(self, requests: "Iterable[BatchRequest]") -> "Batches":
        with closing(self._loader.batches(requests)) as batches:
            for batch in batches:
                if batch.unreadable:
                    self._record(batch.unreadable)
                yield batch

    def close(self) -> None:
        self._loader.close()


def parse_complete_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Parse the complete lines of a JSON Lines file and skip truncated ones, which a power failure may leave."""
    for line in content.splitlines(keepends=True):
        with suppress(ValueError):
            if line.endswith(b"\n"):
                yield json.loads(line)


def _encode_line(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _identity(line: dict[str, Any]) -> tuple[Any, ...]:
    return (line["sample_id"], *(line[name] for name in Location.__dataclass_fields__))
