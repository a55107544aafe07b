"""Watchdog threads: exchange heartbeats over the store, propagate stop requests and failures, detect lost ranks."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from shards.errors import InputError

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 5.0
_GRACE = 5.0
"""Seconds that ranks have to exit on their own after a failure; a rank inside a collective may never return."""


class WorldError(InputError):
    """The ranks of a run cannot continue together."""

    def __init__(self, message: str, exit_code: int = 1, from_peer: bool = False) -> None:
        """from_peer: whether the error occurred on another rank, which reports it itself."""
        super().__init__(message)
        self.exit_code, self.from_peer = exit_code, from_peer


class Store(Protocol):
    """The methods of torch.distributed.Store used here."""

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Failure:
    """Why the run must end, as reported by the rank that failed or detected the failure."""

    rank: int
    host: str
    message: str
    code: int


class Watchdog:
    """Exchanges heartbeats between ranks; in a single process, only keeps the heartbeat file up to date.

    Every rank increments a counter in the store. Rank 0 reads all counters and the others read rank 0's, so the load
    on the store is linear in the number of ranks. There are three threads, because the disk or the store may block
    forever: one uses the disk, one uses the store, and the one that exits the process uses neither.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        hosts: Sequence[str] = ("",),
        lost_after: float = 30.0,
        get_stop_reason: Callable[[], str | None] = lambda: None,
    ) -> None:
        """get_stop_reason: returns this rank's own reason to stop, or None; it may access the disk."""
        self._store, self._rank, self._hosts, self._lost_after = store, rank, hosts, lost_after
        self._get_stop_reason = get_stop_reason
        self.on_heartbeat: Callable[[], None] = lambda: None
        """Called every few seconds; it may access the disk."""
        self.on_exit: Callable[[], None] = lambda: None
        """Called before a watchdog thread exits the process."""
        self.store_unreachable = False
        """Whether the store has stopped responding, so that any further request may block forever."""
        self._last_seen: dict[int, tuple[bytes, float]] = {}
        self._local_reason: str | None = None
        self._stop_reason: str | None = None
        self._failure: Failure | None = None
        self._heartbeats = 0
        self._responses = 0
        self._last_error = ""
        self._stop_published = self._has_failed = False
        self._stopping = threading.Event()
        loops = {"disk": self._poll_disk, "store": self._poll_store, "watch": self._watch_store}
        self._threads = {
            name: threading.Thread(target=target, name=f"watchdog-{name}", daemon=True)
            for name, target in loops.items()
        }

    def start(self) -> None:
        """Start the threads; if there is a store, every rank must call this."""
        self._threads["disk"].start()
        if self._store is not None:
            self._store.set(f"heartbeat/{self._rank}", "0")
            self._store.compare_set("stop", "", "")
            self._store.compare_set("failed", "", "")
            self._threads["store"].start()
            self._threads["watch"].start()

    def stop(self) -> None:
        """Stop the threads, because this rank is about to leave or has reported its failure."""
        self._stopping.set()
        for name, thread in self._threads.items():
            if thread.is_alive() and not (name == "store" and self.store_unreachable):
                thread.join(timeout=_GRACE)

    @property
    def stop_reason(self) -> str | None:
        """The first stop reason that any rank published, or None."""
        return self._stop_reason

    def raise_if_failed(self) -> None:
        """Raise WorldError if another rank has failed or is lost."""
        failure = self._failure
        if failure is not None and not self._has_failed:
            raise WorldError(f"rank {failure.rank} ({failure.host}): {failure.message}", failure.code, True)

    def fail(self, message: str, code: int) -> None:
        """Report this rank's failure to the others; the first report wins."""
        self._has_failed = True  # this rank exits on its own
        if self._store is not None and self._failure is None:
            self._publish(Failure(self._rank, self._hosts[self._rank], message, code))

    def _publish(self, failure: Failure) -> None:
        assert self._store is not None
        winner = self._store.compare_set("failed", "", json.dumps(vars(failure)))
        self._failure = Failure(**json.loads(winner))

    def _poll_disk(self) -> None:
        next_heartbeat = 0.0
        while not self._stopping.is_set():
            with suppress(OSError):  # a network file system may fail transiently
                self._local_reason = self._get_stop_reason()
                if time.monotonic() >= next_heartbeat:
                    self.on_heartbeat()
                    next_heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
            self._stopping.wait(_POLL_SECONDS)

    def _poll_store(self) -> None:
        assert self._store is not None
        while not self._stopping.is_set() and self._failure is None:
            try:
                self._exchange(self._store)
                self._responses += 1
            except Exception as error:  # any store error means that rank 0's node does not respond
                self._last_error = str(error)
            self._stopping.wait(_POLL_SECONDS)

    def _watch_store(self) -> None:
        responses, silent = 0, 0.0
        while not self._stopping.wait(_POLL_SECONDS):
            # Count polls, not wall time: a process that was itself suspended has not missed a response.
            silent = silent + _POLL_SECONDS if responses == self._responses else 0.0
            responses = self._responses
            if self._failure is None and silent > self._lost_after:
                self.store_unreachable = True
                self._failure = Failure(0, self._hosts[0], _lost_message(silent, self._last_error), 1)
            if self._failure is not None and not self._has_failed:
                self._exit_process(self._failure)

    def _exchange(self, store: Store) -> None:
        if self._local_reason is not None and not self._stop_published:
            store.compare_set("stop", "", self._local_reason)
            self._stop_published = True
        self._heartbeats += 1
        store.set(f"heartbeat/{self._rank}", str(self._heartbeats))
        watched = range(len(self._hosts)) if self._rank == 0 else (0,)
        stop, failed, *heartbeats = store.multi_get(["stop", "failed", *(f"heartbeat/{rank}" for rank in watched)])
        self._stop_reason = stop.decode() or None
        if failed:
            self._failure = Failure(**json.loads(failed))
            return
        now = time.monotonic()
        for rank, heartbeat in zip(watched, heartbeats, strict=True):
            known = self._last_seen.get(rank)
            if known is None or known[0] != heartbeat:
                self._last_seen[rank] = (heartbeat, now)
            elif rank != self._rank and now - known[1] > self._lost_after:
                self._publish(Failure(rank, self._hosts[rank], _lost_message(now - known[1]), 1))
                return

    def _exit_process(self, failure: Failure) -> None:
        """Exit the process after a grace period, in which the main thread exits by itself unless it is blocked."""
        if self._stopping.wait(_GRACE):
            return
        force_exit_after(failure.code, _GRACE)  # the logging below may block on the disk
        # This goes to the rank's own log, and on rank 0 also to the terminal.
        _log.error("rank %d (%s): %s", failure.rank, failure.host, failure.message)
        self.on_exit()
        os._exit(failure.code)


def force_exit_after(code: int, seconds: float) -> threading.Timer:
    """Exit this process after `seconds`, whatever it is doing, unless the timer is cancelled."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def _lost_message(seconds: float, error: str = "") -> str:
    cause = f" ({error.splitlines()[0]})" if error else ""
    return (
        f"no heartbeat for {seconds:.0f} s{cause}: its process was killed, its node is gone or the network is down. "
        "Rerun the same command to resume from the last checkpoint"
    )
