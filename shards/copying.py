"""Copying single files, checked and tried again, on several threads that stop together."""

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
from shards.folder_url import FolderUrl, Unreadable
from shards.sample_index import ShardFile

ATTEMPTS = 3
_SECONDS_BEFORE_RETRY = 1.0  # four times as long before the next
_SECONDS_BETWEEN_POLLS = 0.2

Result = TypeVar("Result")


class GivenUp(Exception):
    """Another thread met trouble, or a stop was asked for."""


@dataclass
class Crew:
    """What the copying threads share: bytes done that nobody has shown yet, and whether to give up."""

    given_up: threading.Event = field(default_factory=threading.Event)
    _nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes

    def go_on(self) -> None:
        """Called between two pieces of work."""
        if self.given_up.is_set():
            raise GivenUp

    def take_megabytes(self) -> int:
        """Whole megabytes since the last call."""
        with self._lock:
            megabytes = max(self._nbytes, 0) // 10**6
            self._nbytes -= megabytes * 10**6
        return megabytes


def in_parallel(
    do: Callable[[str], Result], names: list[str], workers: int, crew: Crew, poll: Callable[[], None]
) -> dict[str, Result]:
    """What `do` gave for each name; `poll` is called all the while.

    The first error, of `do` or of `poll`, ends the other threads and is raised.
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
            crew.given_up.set()
            pool.shutdown(cancel_futures=True)
            raise


def copy_file(
    folder: FolderUrl, name: str, path: Path, largest: int, crew: Crew, facts: ShardFile | None = None
) -> None:
    """One file, whole and as `facts` say, or not at all; trouble on the way is met by trying again."""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            crew.given_up.wait(_SECONDS_BEFORE_RETRY * 4 ** (attempt - 1))
        try:
            write_atomically(path, lambda temporary: _download(folder, name, temporary, largest, crew, facts))
            return
        except Unreadable as error:
            if error.lasting:
                raise
            reason = str(error)
    raise Unreadable(f"{reason} ({ATTEMPTS} attempts)")


def _download(folder: FolderUrl, name: str, path: Path, largest: int, crew: Crew, facts: ShardFile | None) -> None:
    digest, nbytes = hashlib.sha256(), 0
    try:
        with path.open("wb") as file, closing(folder.chunks(name)) as chunks:
            for chunk in chunks:
                crew.go_on()
                nbytes += len(chunk)
                crew.count(len(chunk))
                if nbytes > largest:
                    raise Unreadable(f"it has more than the {largest:,} bytes it should have")
                digest.update(chunk)
                file.write(chunk)
        if facts is not None and nbytes != facts.nbytes:
            raise Unreadable(f"{nbytes:,} bytes came, {facts.nbytes:,} were packed")
        if facts is not None and digest.hexdigest() != facts.sha256:
            raise Unreadable("its bytes are not those that were packed (SHA-256)")
    except BaseException:
        crew.count(-nbytes)
        raise
