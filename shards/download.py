"""Copying a packed folder to a disk of this machine: in parallel, checksummed, resumable after any kill."""

import hashlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shards.copying import ATTEMPTS, Crew, Result, copy_file, in_parallel
from shards.dali_index import index_path, write_dali_index
from shards.durable import disk_errors, remove_leftovers, sync, write_bytes
from shards.errors import ConfigError, DataError
from shards.folder_lock import lock_now
from shards.folder_url import FolderUrl, Unreadable, open_folder
from shards.good_files import GoodFiles
from shards.progress import Progress
from shards.sample_index import Dataset, SampleIndex, ShardFile, pack_again
from shards.shard_writer import file_sha256
from shards.verify import index_problems, note_good

_SECONDS_BETWEEN_POLLS = 0.2
_SIDE_FILES = ("index.arrow", "index.parquet", "rejected.parquet", "duplicates.parquet")
_LARGEST_DATASET = 256 * 2**20
_LARGEST_SIDE_FILE, _LARGEST_ROW = 64 * 2**20, 4096  # no server may fill the disk with an endless index
_NOTES = ".staged.jsonl"
_HALF_DONE = ".staging"
_AGAIN = "what is finished is kept, and the same command goes on from there"


class DownloadStopped(Exception):
    """Copying was asked to stop; what is finished is kept and the same command goes on from there."""


@dataclass(frozen=True)
class DownloadReport:
    """Shards copied and shards that were there already; `nbytes` counts the bytes of those copied."""

    copied: int
    kept: int
    nbytes: int


def download_shards(
    source: str, target: Path, workers: int = 4, stop: Callable[[], bool] = lambda: False
) -> DownloadReport:
    """Copy the packed folder `source`, a path or URL, into `target`; what is there and good is kept."""
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
    with _turn(target, stop):
        return _Download(folder, target, dataset, content, workers, stop).carry_out()


def _read_dataset(folder: FolderUrl) -> tuple[Dataset, bytes]:
    """dataset.json of the source, held to the rules of a local one, and its very bytes."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        try:
            copy_file(folder, "dataset.json", place / "dataset.json", _LARGEST_DATASET, Crew())
        except Unreadable as error:
            raise DataError(
                f"{folder.shown}/dataset.json cannot be read: {error}. It is the last file that packing writes: "
                "check the address, and that packing has finished there"
            ) from error
        try:
            dataset = Dataset.load(place)
            _require_sound(dataset, place / "dataset.json")
        except (DataError, ValueError, RecursionError) as error:  # the last two: JSON made to break its reader
            reason = _as_said_of(folder, str(error), place)
            if not isinstance(error, DataError):
                reason = f"{folder.shown}/dataset.json is not readable JSON ({reason})"
            raise DataError(f"{reason}. Nothing was copied; pack it again where it was packed") from error
        return dataset, (place / "dataset.json").read_bytes()


def _as_said_of(folder: FolderUrl, reason: str, place: Path, dataset: Dataset | None = None) -> str:
    """An error about a file copied to `place`, in the words of where it came from."""
    return reason.removesuffix(pack_again(place, dataset)).rstrip(". ").replace(str(place), folder.shown)


def _require_sound(dataset: Dataset, path: Path) -> None:
    """What is used below as a number or a checksum is one."""
    numbers = [dataset.count, dataset.usable, *(shard.nbytes for shard in dataset.shards)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise DataError(f"{path} has a number of rows or bytes that is none")
    if any(not re.fullmatch("[0-9a-f]{64}", str(shard.sha256)) for shard in dataset.shards):
        raise DataError(f"{path} has a checksum that is none")


@contextmanager
def _turn(target: Path, stop: Callable[[], bool]) -> Iterator[None]:
    """Alone in the folder: of several processes of a node one copies, the others wait and find it done."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        if not lock_now(descriptor):
            print(f"download: another process is writing into {target}; waiting for it", file=sys.stderr, flush=True)
            while not lock_now(descriptor):
                _obey(stop, target)
                time.sleep(_SECONDS_BETWEEN_POLLS)
        yield
    finally:
        os.close(descriptor)


def _obey(stop: Callable[[], bool], target: Path) -> None:
    if stop():
        raise DownloadStopped(f"copying into {target} was stopped; {_AGAIN}")


@dataclass(frozen=True)
class _Download:
    """One copy of one data set into one folder, by the only process that may write there now."""

    folder: FolderUrl
    target: Path
    dataset: Dataset
    content: bytes
    workers: int
    stop: Callable[[], bool]

    def carry_out(self) -> DownloadReport:
        """Index, then shards, then dataset.json: it means "finished"."""
        self._claim()
        notes = GoodFiles(self.target, _NOTES)
        shards = {shard.file: shard for shard in self.dataset.shards}
        of_index = hashlib.sha256(self.content).hexdigest()  # the index files belong to this very dataset.json
        index_is_here = all(notes.vouch(name, of_index) for name in _SIDE_FILES)
        unsure = [name for name, shard in shards.items() if not notes.vouch(name, shard.sha256)]
        good = self._recognised([name for name in unsure if (self.target / name).is_file()], shards, notes)
        missing = [name for name in unsure if name not in good]
        if missing or not index_is_here:
            self._reopen()
        if not index_is_here:
            self._bring_index()
            for name in _SIDE_FILES:
                notes.add(name, of_index)
        self._require_room(sum(shards[name].nbytes for name in missing))
        self._bring_shards(missing, shards, notes)
        self._finish()
        self._index_for_dali()
        note_good(self.target)  # checksums were taken from the very bytes written
        nbytes = sum(shards[name].nbytes for name in missing)
        return DownloadReport(copied=len(missing), kept=len(shards) - len(missing), nbytes=nbytes)

    def _claim(self) -> None:
        """Refuse a folder that holds something else; sweep up after a killed process."""
        for found in (self.target / "dataset.json", self.target / _HALF_DONE / "dataset.json"):
            if found.exists() and found.read_bytes() != self.content:
                raise DataError(
                    f"{self.target} already holds another data set than {self.folder.shown}; "
                    f"choose another target, or remove it: rm -r {shlex.quote(str(self.target))}"
                )
            if found.exists():
                remove_leftovers(self.target)
                return
        strangers = sorted(path.name for path in self.target.iterdir() if path.name != _HALF_DONE)
        if strangers:
            raise DataError(
                f"{self.target} is not empty ({strangers[0]}) and not a copy of {self.folder.shown}; "
                "choose another target"
            )
        write_bytes(self.target / _HALF_DONE / "dataset.json", self.content)

    def _reopen(self) -> None:
        """Without its dataset.json a finished folder is unfinished, which it is while files of it are replaced."""
        finished = self.target / "dataset.json"
        if finished.exists():
            with disk_errors(finished):
                (self.target / _HALF_DONE).mkdir(exist_ok=True)
                os.replace(finished, self.target / _HALF_DONE / "dataset.json")

    def _recognised(self, names: list[str], shards: dict[str, ShardFile], notes: GoodFiles) -> set[str]:
        """Of the shards that are there without a note, those with the right bytes."""
        crew = Crew()

        def is_good(name: str) -> bool:
            crew.go_on()
            path, facts = self.target / name, shards[name]
            good = path.stat().st_size == facts.nbytes and file_sha256(path) == facts.sha256
            if good:
                notes.add(name, facts.sha256)
            crew.count(facts.nbytes)
            return good

        with Progress("check", _megabytes(shards[name].nbytes for name in names), unit="MB") as progress:
            found = self._in_parallel(is_good, names, crew, progress)
        return {name for name, good in found.items() if good}

    def _bring_index(self) -> None:
        """The index files, put in place once they are those that dataset.json speaks of."""
        place, crew = self.target / _HALF_DONE, Crew()
        largest = _LARGEST_SIDE_FILE + _LARGEST_ROW * self.dataset.count

        def bring(name: str) -> None:
            try:
                copy_file(self.folder, name, place / name, largest, crew)
            except Unreadable as error:
                raise self._uncopied(name, error) from error

        problem = ""
        for _attempt in range(ATTEMPTS):
            self._in_parallel(bring, list(_SIDE_FILES), crew)
            problem = self._index_problem(place)
            if not problem:
                break
        else:
            raise self._uncopied("index.arrow or index.parquet", problem)
        for name in _SIDE_FILES:
            os.replace(place / name, self.target / name)

    def _index_problem(self, place: Path) -> str:
        try:
            return next(index_problems(SampleIndex.load(place)), "")
        except DataError as error:
            return _as_said_of(self.folder, str(error), place, self.dataset)

    def _require_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self.target).free
        if nbytes > free:
            raise DataError(
                f"the disk of {self.target} has {free / 1e9:,.1f} GB free, {nbytes / 1e9:,.1f} GB are still to be "
                f"copied; free some space there, or choose another target; {_AGAIN}"
            )

    def _bring_shards(self, names: list[str], shards: dict[str, ShardFile], notes: GoodFiles) -> None:
        crew = Crew()

        def bring(name: str) -> None:
            try:
                copy_file(self.folder, name, self.target / name, shards[name].nbytes, crew, shards[name])
            except Unreadable as error:
                raise self._uncopied(name, error) from error
            notes.add(name, shards[name].sha256)

        everything = _megabytes(shard.nbytes for shard in shards.values())
        done = everything - _megabytes(shards[name].nbytes for name in names)
        with Progress("download", everything, done, unit="MB") as progress:
            self._in_parallel(bring, names, crew, progress)

    def _index_for_dali(self) -> None:
        """Where the source has index files for DALI, make them anew: they follow from bytes that were checked."""
        names = [shard.file for shard in self.dataset.shards if shard.samples]
        try:
            wanted = bool(names) and self.folder.holds(index_path(Path(names[0])).name)
        except Unreadable as error:
            raise self._uncopied(index_path(Path(names[0])).name, error) from error
        if wanted:
            write_dali_index(SampleIndex.load(self.target))

    def _in_parallel(
        self, do: Callable[[str], Result], names: list[str], crew: Crew, progress: Progress | None = None
    ) -> dict[str, Result]:
        def poll() -> None:
            _obey(self.stop, self.target)
            if progress is not None:
                progress.advance(crew.take_megabytes())

        return in_parallel(do, names, self.workers, crew, poll)

    def _uncopied(self, name: str, reason: object) -> DataError:
        return DataError(f"{self.folder.shown}/{name} cannot be copied: {reason}. Mend it there; {_AGAIN}")

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
