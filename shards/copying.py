"""Copies files in parallel threads, with checksums and retries; the first failure cancels all threads."""

import hashlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from shards.durable import write_atomically
from shards.folder_url import FolderUrl, ReadFailed
from shards.sample_index import ShardFile

ATTEMPTS = 3
_SECONDS_BEFORE_RETRY = 1.0  # before the first retry; each later wait is four times as long
_SECONDS_BETWEEN_POLLS = 0.2

Result = TypeVar("Result")


class Cancelled(Exception):
    """Raised in a copying thread after another thread failed or a stop was requested."""


@dataclass
class CopyControl:
    """State shared by the copying threads: the cancellation flag and the bytes not yet reported as progress."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    _nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled if the copy was cancelled; called for every chunk."""
        if self.cancelled.is_set():
            raise Cancelled

    def take_megabytes(self) -> int:
        """Return the whole megabytes copied since the last call; the remainder counts towards the next."""
        with self._lock:
            megabytes = max(self._nbytes, 0) // 10**6
            self._nbytes -= megabytes * 10**6
        return megabytes


def run_in_parallel(
    do: Callable[[str], Result], names: list[str], workers: int, control: CopyControl, poll: Callable[[], None]
) -> dict[str, Result]:
    """Call `do` on every name in a thread pool, and `poll` periodically; return the results by name.

    The first exception from `do` or `poll` cancels the remaining work and is re-raised.
    """
    ready: queue.SimpleQueue[tuple[str, Future[Result]]] = queue.SimpleQueue()

    def begin(name: str) -> None:
        pool.submit(do, name).add_done_callback(lambda future: ready.put((name, future)))

    with ThreadPoolExecutor(workers) as pool:
        try:
            for name in names:
                begin(name)
            results: dict[str, Result] = {}
            while len(results) < len(names):
                poll()
                with suppress(queue.Empty):
                    name, future = ready.get(timeout=_SECONDS_BETWEEN_POLLS)
                    results[name] = future.result()
            poll()
            return results
        except BaseException:
            control.cancelled.set()
            pool.shutdown(cancel_futures=True)
            raise


def copy_file(
    folder: FolderUrl, name: str, path: Path, largest: int, control: CopyControl, facts: ShardFile | None = None
) -> None:
    """Copy one file atomically, retrying transient errors; check its size and SHA-256 if `facts` is given.

    largest: give up if the file has more bytes than this.
    """
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            control.cancelled.wait(_SECONDS_BEFORE_RETRY * 4 ** (attempt - 1))
        try:
            write_atomically(path, lambda temporary: _download(folder, name, temporary, largest, control, facts))
            return
        except ReadFailed as error:
            if error.permanent:
                raise
            reason = str(error)
    raise ReadFailed(f"{reason} ({ATTEMPTS} attempts)")


def _download(
    folder: FolderUrl, name: str, path: Path, largest: int, control: CopyControl, facts: ShardFile | None
) -> None:
    digest, nbytes = hashlib.sha256(), 0
    try:
        with path.open("wb") as file, closing(folder.chunks(name)) as chunks:
            for chunk in chunks:
                control.raise_if_cancelled()
                nbytes += len(chunk)
                control.count(len(chunk))
                if nbytes > largest:
                    raise ReadFailed(f"it is larger than expected (more than {largest:,} bytes)")
                digest.update(chunk)
                file.write(chunk)
        if facts is not None and nbytes != facts.nbytes:
            raise ReadFailed(f"received {nbytes:,} bytes instead of {facts.nbytes:,}")
        if facts is not None and digest.hexdigest() != facts.sha256:
            raise ReadFailed("its SHA-256 does not match the one recorded in dataset.json")
    except BaseException:
        control.count(-nbytes)
        raise
