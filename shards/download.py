"""Downloads a packed folder to a local disk: in parallel, checksummed, resumable after a kill."""

import logging
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shards.dali_index import index_path, write_dali_index
from shards.durable import disk_errors, hash_file, remove_leftovers, sync, write_bytes
from shards.errors import CommandStopped, ConfigError, DataError
from shards.folder_lock import try_lock
from shards.folder_url import FolderUrl, ReadFailed, open_folder
from shards.progress import Progress
from shards.sample_index import Dataset, SampleIndex, ShardFile, suggest_packing
from shards.source_files import SOURCE_FILES
from shards.verify import index_problems, is_marked_verified, mark_verified

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_POLLS = 0.2
_SIDE_FILES = ("index.arrow", "index.parquet", "rejected.parquet", "duplicates.parquet")
_LARGEST_DATASET = 256 * 2**20
_LARGEST_SIDE_FILE, _LARGEST_ROW = 64 * 2**20, 4096  # a server must not fill the disk with an endless index
_HALF_DONE = ".staging"
_AGAIN = "finished files are kept; run the same command again to resume"


@dataclass(frozen=True)
class DownloadReport:
    """Number of shards copied, their total bytes, and the number of shards that were already present."""

    copied: int
    kept: int
    nbytes: int


def download_shards(
    source: str, target: Path, workers: int = 4, stop: Callable[[], bool] = lambda: False
) -> DownloadReport:
    """Copy the packed folder at `source`, a path or URL, into `target`; intact files already in `target` are kept."""
    if workers < 1:
        raise ConfigError(f"workers ({workers}) must be 1 or more")
    folder = open_folder(source)
    if folder.is_folder(target):
        raise ConfigError(f"{source} and {target} are the same folder; there is nothing to copy")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder; choose another target")
    dataset, content = _read_dataset(folder)
    with disk_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    with _lock_target(target, stop):
        return _Download(folder, target, dataset, content, workers, stop).run()


def _read_dataset(folder: FolderUrl) -> tuple[Dataset, bytes]:
    """Fetch and validate the dataset.json of the source; return it parsed, and its raw bytes."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        try:
            folder.fetch("dataset.json", place / "dataset.json", _LARGEST_DATASET, threading.Event())
        except ReadFailed as error:
            raise DataError(
                f"{folder.shown}/dataset.json cannot be read: {error}. Packing writes this file last: "
                "check the address, and that packing has finished"
            ) from error
        try:
            dataset = Dataset.load(place)
            _require_valid(dataset, place / "dataset.json")
        except (DataError, ValueError, RecursionError) as error:  # malformed JSON can raise the last two
            reason = _reword(folder, error, place)
            if not isinstance(error, DataError):
                reason = f"{folder.shown}/dataset.json is not readable JSON ({reason})"
            raise DataError(f"{reason}. Nothing was copied; pack the source again") from error
        return dataset, (place / "dataset.json").read_bytes()


def _reword(folder: FolderUrl, error: Exception, place: Path, dataset: Dataset | None = None) -> str:
    """Rewrite an error about the local copy in `place` so that it names the source address."""
    return str(error).removesuffix(suggest_packing(place, dataset)).rstrip(". ").replace(str(place), folder.shown)


def _require_valid(dataset: Dataset, path: Path) -> None:
    """Check the types of the sizes and checksums, because the source is untrusted."""
    numbers = [dataset.count, dataset.usable, *(shard.nbytes for shard in dataset.shards)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise DataError(f"{path} has an invalid number of rows or bytes")
    if any(not re.fullmatch("[0-9a-f]{64}", str(shard.sha256)) for shard in dataset.shards):
        raise DataError(f"{path} has an invalid checksum")


@contextmanager
def _lock_target(target: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Lock the folder, so that one process per node downloads; the others wait until it has finished."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            _log.info("download: another process is writing to %s; waiting", target)
            while not try_lock(descriptor):
                _raise_if_stopped(stop, target)
                time.sleep(_SECONDS_BETWEEN_POLLS)
        yield
    finally:
        os.close(descriptor)


def _raise_if_stopped(stop: Callable[[], bool], target: Path) -> None:
    if stop():
        raise CommandStopped(f"the download to {target} was stopped; {_AGAIN}")


@dataclass(frozen=True)
class _Download:
    """Downloads one data set to one folder. The caller holds the lock of that folder."""

    folder: FolderUrl
    target: Path
    dataset: Dataset
    content: bytes
    """Of dataset.json."""
    workers: int
    stop: Callable[[], bool]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def run(self) -> DownloadReport:
        """Copy the index, then the shards; dataset.json, which marks the folder as complete, comes last."""
        self._claim()
        copied: list[ShardFile] = []
        if not ((self.target / "dataset.json").exists() and is_marked_verified(self.target)):
            with disk_errors(self.target):
                self._reopen()
                side_files = self._download_index()
                self._require_room()
                copied = self._download_shards()
                self._finish(side_files)
        self._write_dali_index()
        mark_verified(self.target)  # all checksums were computed
        nbytes = sum(shard.nbytes for shard in copied)
        return DownloadReport(copied=len(copied), kept=len(self.dataset.shards) - len(copied), nbytes=nbytes)

    @property
    def _place(self) -> Path:
        """Where dataset.json and the index are until the folder is complete."""
        return self.target / _HALF_DONE

    def _claim(self) -> None:
        """Refuse a folder with other content; in one that holds this data set, remove leftover temporary files."""
        for found in (self.target / "dataset.json", self._place / "dataset.json"):
            if found.exists() and found.read_bytes() != self.content:
                raise DataError(
                    f"{self.target} already holds a data set that differs from {self.folder.shown}; "
                    f"choose another target, or remove this one: rm -r {shlex.quote(str(self.target))}"
                )
            if found.exists():
                remove_leftovers(self.target)
                return
        strangers = sorted(path.name for path in self.target.iterdir() if path.name != _HALF_DONE)
        if strangers:
            raise DataError(
                f"{self.target} is not empty (it contains {strangers[0]}) and is not a copy of {self.folder.shown}; "
                "choose another target"
            )
        write_bytes(self._place / "dataset.json", self.content)

    def _reopen(self) -> None:
        """Move dataset.json away, so that the folder counts as incomplete while files are replaced."""
        if (self.target / "dataset.json").exists():
            self._place.mkdir(exist_ok=True)
            os.replace(self.target / "dataset.json", self._place / "dataset.json")

    def _download_index(self) -> list[str]:
        """Download the index files next to dataset.json, and check that they match; return their names."""
        for name in _SIDE_FILES:
            self._fetch_small(name)
        names = [*_SIDE_FILES, *([SOURCE_FILES] if self._fetch_if_there(SOURCE_FILES) else [])]
        try:
            problem = next(index_problems(SampleIndex.load(self._place)), "")
        except DataError as error:
            problem = _reword(self.folder, error, self._place, self.dataset)
        if problem:
            raise self._copy_error("index.arrow or index.parquet", problem)
        return names

    def _fetch_small(self, name: str) -> None:
        _raise_if_stopped(self.stop, self.target)
        largest = _LARGEST_SIDE_FILE + _LARGEST_ROW * self.dataset.count
        try:
            self.folder.fetch(name, self._place / name, largest, self.cancelled)
        except ReadFailed as error:
            raise self._copy_error(name, error) from error

    def _fetch_if_there(self, name: str) -> bool:
        """Download a file that not every folder has; return whether this one has it."""
        try:
            self._fetch_small(name)
        except DataError as error:
            if isinstance(error.__cause__, ReadFailed) and error.__cause__.permanent:
                return False
            raise
        return True

    def _require_room(self) -> None:
        nbytes = sum(shard.nbytes for shard in self.dataset.shards if not self._has_size(shard))
        free = shutil.disk_usage(self.target).free
        if nbytes > free:
            raise DataError(
                f"{self.target} has {free / 1e9:,.1f} GB of free disk space, but {nbytes / 1e9:,.1f} GB remain to be "
                f"copied. Free some space or choose another target; {_AGAIN}"
            )

    def _has_size(self, shard: ShardFile) -> bool:
        path = self.target / shard.file
        return path.is_file() and path.stat().st_size == shard.nbytes

    def _download_shards(self) -> list[ShardFile]:
        """Download the shards that are missing or damaged, in parallel; return them."""
        total = sum(shard.nbytes for shard in self.dataset.shards)
        done, copied = 0, []
        with Progress("download", total // 10**6, unit="MB") as progress, ThreadPoolExecutor(self.workers) as pool:
            running = {pool.submit(self._bring, shard): shard for shard in self.dataset.shards}
            try:
                while running:
                    _raise_if_stopped(self.stop, self.target)
                    for future in wait(running, _SECONDS_BETWEEN_POLLS, FIRST_COMPLETED).done:
                        shard = running.pop(future)
                        if future.result():
                            copied.append(shard)
                        done += shard.nbytes
                        progress.advance(done // 10**6 - progress.done)
                _raise_if_stopped(self.stop, self.target)
            except BaseException:
                self.cancelled.set()
                pool.shutdown(cancel_futures=True)
                raise
        return copied

    def _bring(self, shard: ShardFile) -> bool:
        """Download a shard, unless an intact copy is there; return whether it was downloaded."""
        path = self.target / shard.file
        if self._has_size(shard) and hash_file(path) == shard.sha256:
            return False
        try:
            self.folder.fetch(shard.file, path, shard.nbytes, self.cancelled, shard.sha256)
        except ReadFailed as error:
            raise self._copy_error(shard.file, error) from error
        return True

    def _finish(self, side_files: list[str]) -> None:
        for name in side_files:
            os.replace(self._place / name, self.target / name)
        sync(self.target)
        os.replace(self._place / "dataset.json", self.target / "dataset.json")
        sync(self.target)
        shutil.rmtree(self._place, ignore_errors=True)

    def _write_dali_index(self) -> None:
        """If the source has index files for DALI, create them from the verified shards instead of copying them."""
        names = [index_path(Path(shard.file)).name for shard in self.dataset.shards if shard.samples]
        if names and self._fetch_if_there(names[0]):
            write_dali_index(SampleIndex.load(self.target))
        shutil.rmtree(self._place, ignore_errors=True)

    def _copy_error(self, name: str, reason: object) -> DataError:
        return DataError(f"{self.folder.shown}/{name} cannot be copied: {reason}. Repair the source; {_AGAIN}")
