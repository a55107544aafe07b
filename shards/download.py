"""Downloads a packed folder to a local disk: in parallel, checksummed, resumable after a kill."""

import hashlib
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shards.copying import ATTEMPTS, CopyControl, Result, copy_file, run_in_parallel
from shards.dali_index import index_path, write_dali_index
from shards.durable import disk_errors, hash_file, remove_leftovers, sync, write_bytes
from shards.errors import CommandStopped, ConfigError, DataError
from shards.folder_lock import try_lock
from shards.folder_url import FolderUrl, ReadFailed, open_folder
from shards.progress import Progress
from shards.sample_index import Dataset, SampleIndex, ShardFile, suggest_packing
from shards.source_files import SOURCE_FILES
from shards.verified_files import VerifiedFiles
from shards.verify import index_problems, mark_verified

_log = logging.getLogger(__name__)

_SECONDS_BETWEEN_POLLS = 0.2
_SIDE_FILES = ("index.arrow", "index.parquet", "rejected.parquet", "duplicates.parquet")
_LARGEST_DATASET = 256 * 2**20
_LARGEST_SIDE_FILE, _LARGEST_ROW = 64 * 2**20, 4096  # a server must not fill the disk with an endless index
_NOTES = ".staged.jsonl"
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
            copy_file(folder, "dataset.json", place / "dataset.json", _LARGEST_DATASET, CopyControl())
        except ReadFailed as error:
            raise DataError(
                f"{folder.shown}/dataset.json cannot be read: {error}. Packing writes this file last: "
                "check the address, and that packing has finished"
            ) from error
        try:
            dataset = Dataset.load(place)
            _require_valid(dataset, place / "dataset.json")
        except (DataError, ValueError, RecursionError) as error:  # malformed JSON can raise the last two
            reason = _reword(folder, str(error), place)
            if not isinstance(error, DataError):
                reason = f"{folder.shown}/dataset.json is not readable JSON ({reason})"
            raise DataError(f"{reason}. Nothing was copied; pack the source again") from error
        return dataset, (place / "dataset.json").read_bytes()


def _reword(folder: FolderUrl, reason: str, place: Path, dataset: Dataset | None = None) -> str:
    """Rewrite an error about the local copy in `place` so that it names the source address."""
    return reason.removesuffix(suggest_packing(place, dataset)).rstrip(". ").replace(str(place), folder.shown)


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
    workers: int
    stop: Callable[[], bool]

    def run(self) -> DownloadReport:
        """Copy the index, then the shards, then dataset.json, which marks the folder as complete."""
        self._claim()
        notes = VerifiedFiles(self.target, _NOTES)
        shards = {shard.file: shard for shard in self.dataset.shards}
        of_index = hashlib.sha256(self.content).hexdigest()  # the index files belong to this dataset.json
        side_files = [*_SIDE_FILES, *([SOURCE_FILES] if self._holds(SOURCE_FILES) else [])]
        index_is_here = all(notes.is_verified(name, of_index) for name in side_files)
        unsure = [name for name, shard in shards.items() if not notes.is_verified(name, shard.sha256)]
        good = self._find_good([name for name in unsure if (self.target / name).is_file()], shards, notes)
        missing = [name for name in unsure if name not in good]
        if missing or not index_is_here:
            self._reopen()
        if not index_is_here:
            self._download_index(side_files)
            for name in side_files:
                notes.add(name, of_index)
        self._require_room(sum(shards[name].nbytes for name in missing))
        self._download_shards(missing, shards, notes)
        self._finish()
        self._write_dali_index()
        mark_verified(self.target)  # the checksums were computed while writing
        nbytes = sum(shards[name].nbytes for name in missing)
        return DownloadReport(copied=len(missing), kept=len(shards) - len(missing), nbytes=nbytes)

    def _claim(self) -> None:
        """Refuse a folder with other content; in one that holds this data set, remove leftover temporary files."""
        for found in (self.target / "dataset.json", self.target / _HALF_DONE / "dataset.json"):
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
        write_bytes(self.target / _HALF_DONE / "dataset.json", self.content)

    def _reopen(self) -> None:
        """Move dataset.json away while files are replaced, so that the folder counts as incomplete."""
        finished = self.target / "dataset.json"
        if finished.exists():
            with disk_errors(finished):
                (self.target / _HALF_DONE).mkdir(exist_ok=True)
                os.replace(finished, self.target / _HALF_DONE / "dataset.json")

    def _find_good(self, names: list[str], shards: dict[str, ShardFile], notes: VerifiedFiles) -> set[str]:
        """Hash the named shards in the target folder; log and return those that match their checksum."""
        control = CopyControl()

        def is_good(name: str) -> bool:
            control.raise_if_cancelled()
            path, facts = self.target / name, shards[name]
            good = path.stat().st_size == facts.nbytes and hash_file(path) == facts.sha256
            if good:
                notes.add(name, facts.sha256)
            control.count(facts.nbytes)
            return good

        with Progress("check", _megabytes(shards[name].nbytes for name in names), unit="MB") as progress:
            found = self._run_in_parallel(is_good, names, control, progress)
        return {name for name, good in found.items() if good}

    def _download_index(self, names: list[str]) -> None:
        """Download the index files to a temporary folder; move them to the target if they match dataset.json."""
        place, control = self.target / _HALF_DONE, CopyControl()
        largest = _LARGEST_SIDE_FILE + _LARGEST_ROW * self.dataset.count

        def copy(name: str) -> None:
            try:
                copy_file(self.folder, name, place / name, largest, control)
            except ReadFailed as error:
                raise self._copy_error(name, error) from error

        problem = ""
        for _attempt in range(ATTEMPTS):
            self._run_in_parallel(copy, names, control)
            problem = self._index_problem(place)
            if not problem:
                break
        else:
            raise self._copy_error("index.arrow or index.parquet", problem)
        for name in names:
            os.replace(place / name, self.target / name)

    def _index_problem(self, place: Path) -> str:
        try:
            return next(index_problems(SampleIndex.load(place)), "")
        except DataError as error:
            return _reword(self.folder, str(error), place, self.dataset)

    def _require_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.target).free
        if nbytes > free:
            raise DataError(
                f"{self.target} has {free / 1e9:,.1f} GB of free disk space, but {nbytes / 1e9:,.1f} GB remain to be "
                f"copied. Free some space or choose another target; {_AGAIN}"
            )

    def _download_shards(self, names: list[str], shards: dict[str, ShardFile], notes: VerifiedFiles) -> None:
        control = CopyControl()

        def copy(name: str) -> None:
            try:
                copy_file(self.folder, name, self.target / name, shards[name].nbytes, control, shards[name])
            except ReadFailed as error:
                raise self._copy_error(name, error) from error
            notes.add(name, shards[name].sha256)

        everything = _megabytes(shard.nbytes for shard in shards.values())
        done = everything - _megabytes(shards[name].nbytes for name in names)
        with Progress("download", everything, done, unit="MB") as progress:
            self._run_in_parallel(copy, names, control, progress)

    def _write_dali_index(self) -> None:
        """If the source has index files for DALI, create them from the verified shards instead of copying them."""
        names = [shard.file for shard in self.dataset.shards if shard.samples]
        if names and self._holds(index_path(Path(names[0])).name):
            write_dali_index(SampleIndex.load(self.target))

    def _holds(self, name: str) -> bool:
        try:
            return self.folder.holds(name)
        except ReadFailed as error:
            raise self._copy_error(name, error) from error

    def _run_in_parallel(
        self, do: Callable[[str], Result], names: list[str], control: CopyControl, progress: Progress | None = None
    ) -> dict[str, Result]:
        def poll() -> None:
            _raise_if_stopped(self.stop, self.target)
            if progress is not None:
                progress.advance(control.take_megabytes())

        return run_in_parallel(do, names, self.workers, control, poll)

    def _copy_error(self, name: str, reason: object) -> DataError:
        return DataError(f"{self.folder.shown}/{name} cannot be copied: {reason}. Repair the source; {_AGAIN}")

    def _finish(self) -> None:
        place = self.target / _HALF_DONE
        if (place / "dataset.json").exists():
            with disk_errors(self.target):
                sync(self.target)
                os.replace(place / "dataset.json", self.target / "dataset.json")
                sync(self.target)
        shutil.rmtree(place, ignore_errors=True)


def _megabytes(sizes: Iterable[int]) -> int:
    return sum(sizes) // 10**6
