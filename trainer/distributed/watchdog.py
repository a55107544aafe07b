"""Signs of life: threads of each rank that tell the others it lives, and learn of a stop, a failure or a death."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from shards.errors import InputError

_PERIOD = 0.25
_SECONDS_BETWEEN_BEATS = 5.0
_GRACE = 5.0
"""Seconds a failed run's ranks have to end by themselves; one inside a collective may not come back."""


class WorldError(InputError):
    """The ranks of a run cannot go on together."""

    def __init__(self, message: str, exit_code: int = 1, from_peer: bool = False) -> None:
        """of_another: a rank has failed that says so itself."""
        super().__init__(message)
        self.exit_code, self.from_peer = exit_code, from_peer


class Store(Protocol):
    """What torch's stores offer, as far as needed here."""

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True)
class Failure:
    """Why a run's ranks must end, in the words of the rank that knows."""

    rank: int
    host: str
    message: str
    code: int


class Watchdog:
    """Alone it only keeps the heartbeat file fresh; with others it also watches them.

    Every rank tells the store that it lives; rank 0 looks at all of them, the others look at rank 0: the load on
    the store grows with the number of ranks, not with its square. Three threads, since each may be held up by what
    must not hold up the others: a store whose node has vanished need not answer, nor a shared disk, and the one that
    ends the process asks neither.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        hosts: Sequence[str] = ("",),
        lost_after: float = 30.0,
        wish: Callable[[], str | None] = lambda: None,
    ) -> None:
        """wish: why this rank wants to stop; it may ask the disk."""
        self._store, self._rank, self._hosts, self._lost_after = store, rank, hosts, lost_after
        self._wish = wish
        self.on_heartbeat: Callable[[], None] = lambda: None
        """Called every few seconds; it may ask the disk."""
        self.on_exit: Callable[[], None] = lambda: None
        """Called before a thread of this pulse ends the process."""
        self.store_unreachable = False
        """Whether the store does not answer any more: who asks it again may wait for ever."""
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._wished: str | None = None
        self._stop_reason: str | None = None
        self._failure: Failure | None = None
        self._count = 0
        self._answers = 0
        self._last_error = ""
        self._told = self._has_failed = False
        self._ending = threading.Event()
        work = {"disk": self._ask_disk, "talk": self._talk, "watch": self._watch}
        self._threads = {
            name: threading.Thread(target=target, name=f"pulse-{name}", daemon=True) for name, target in work.items()
        }

    def start(self) -> None:
        """All ranks call it together with the store, once `wish` can be asked."""
        self._threads["disk"].start()
        if self._store is not None:
            self._store.set(f"pulse/{self._rank}", "0")
            self._store.compare_set("stop", "", "")
            self._store.compare_set("failed", "", "")
            self._threads["talk"].start()
            self._threads["watch"].start()

    def stop(self) -> None:
        """No more signs of life: this rank is about to leave, and has told why."""
        self._ending.set()
        for name, thread in self._threads.items():
            if thread.is_alive() and not (name == "talk" and self.store_unreachable):
                thread.join(timeout=_GRACE)

    @property
    def stop_reason(self) -> str | None:
        """Why some rank wants to stop."""
        return self._stop_reason

    def raise_if_failed(self) -> None:
        """Raise where another rank has failed or is lost."""
        failure = self._failure
        if failure is not None and not self._has_failed:
            raise WorldError(f"rank {failure.rank} ({failure.host}): {failure.message}", failure.code, True)

    def fail(self, message: str, code: int) -> None:
        """Tell the others that this rank ends, and why; the first to tell is believed."""
        self._has_failed = True  # and ends by itself
        if self._store is not None and self._failure is None:
            self._tell(Failure(self._rank, self._hosts[self._rank], message, code))

    def _tell(self, failure: Failure) -> None:
        assert self._store is not None
        first = self._store.compare_set("failed", "", json.dumps(vars(failure)))
        self._failure = Failure(**json.loads(first))

    def _ask_disk(self) -> None:
        next_beat = 0.0
        while not self._ending.is_set():
            with suppress(OSError):  # a network file system may fail for a while
                self._wished = self._wish()
                if time.monotonic() >= next_beat:
                    self.on_heartbeat()
                    next_beat = time.monotonic() + _SECONDS_BETWEEN_BEATS
            self._ending.wait(_PERIOD)

    def _talk(self) -> None:
        assert self._store is not None
        while not self._ending.is_set() and self._failure is None:
            try:
                self._exchange(self._store)
                self._answers += 1
            except Exception as error:  # of the store: whatever it is, rank 0's node does not answer
                self._last_error = str(error)
            self._ending.wait(_PERIOD)

    def _watch(self) -> None:
        answers, silent = 0, 0.0
        while not self._ending.wait(_PERIOD):
            # Looks are counted, not time: a process that was held still itself has not missed any answer.
            silent = silent + _PERIOD if answers == self._answers else 0.0
            answers = self._answers
            if self._failure is None and silent > self._lost_after:
                self.store_unreachable = True
                self._failure = Failure(0, self._hosts[0], _unheard(silent, self._last_error), 1)
            if self._failure is not None and not self._has_failed:
                self._end_the_process(self._failure)

    def _exchange(self, store: Store) -> None:
        if self._wished is not None and not self._told:
            store.compare_set("stop", "", self._wished)
            self._told = True
        self._count += 1
        store.set(f"pulse/{self._rank}", str(self._count))
        watched = range(len(self._hosts)) if self._rank == 0 else (0,)
        stop, failed, *beats = store.multi_get(["stop", "failed", *(f"pulse/{rank}" for rank in watched)])
        self._stop_reason = stop.decode() or None
        if failed:
            self._failure = Failure(**json.loads(failed))
            return
        now = time.monotonic()
        for rank, watchdog in zip(watched, beats, strict=True):
            known = self._seen.get(rank)
            if known is None or known[0] != watchdog:
                self._seen[rank] = (watchdog, now)
            elif rank != self._rank and now - known[1] > self._lost_after:
                self._tell(Failure(rank, self._hosts[rank], _unheard(now - known[1]), 1))
                return

    def _end_the_process(self, failure: Failure) -> None:
        """The main thread raises at its next look; where it cannot look, inside a collective, this ends it."""
        if self._ending.wait(_GRACE):
            return
        end_soon(failure.code, _GRACE)  # the words below go to a disk that may not answer
        # Into this rank's log, and on rank 0 to the terminal too.
        print(f"incv: error: rank {failure.rank} ({failure.host}): {failure.message}", file=sys.stderr, flush=True)
        self.on_exit()
        os._exit(failure.code)


def end_soon(code: int, seconds: float) -> threading.Timer:
    """End this process after so many seconds, whatever it is doing, unless the timer is cancelled."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer


def _unheard(seconds: float, why: str = "") -> str:
    because = f" ({why.splitlines()[0]})" if why else ""
    return (
        f"no sign of life for {seconds:.0f} s{because}: its process was killed, its node is gone or the network is "
        "down. The same command goes on from the last checkpoint"
    )
