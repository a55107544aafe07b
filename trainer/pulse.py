"""Signs of life: threads of each rank that tell the others it lives, and learn of a stop, a failure or a death."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shards.errors import InputError

_PERIOD = 0.25
_SECONDS_BETWEEN_BEATS = 5.0
_GRACE = 5.0
"""Seconds a failed run's ranks have to end by themselves; one inside a collective may not come back."""


class WorldError(InputError):
    """The ranks of a run cannot go on together."""

    def __init__(self, message: str, exit_code: int = 1, of_another: bool = False) -> None:
        """of_another: a rank has failed that says so itself."""
        super().__init__(message)
        self.exit_code, self.of_another = exit_code, of_another


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


class Pulse:
    """Alone it only keeps the heartbeat file fresh; with others it also watches them.

    Every rank tells the store that it lives; rank 0 looks at all of them, the others look at rank 0: the load on
    the store grows with the number of ranks, not with its square.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        hosts: Sequence[str] = ("",),
        lost_after: float = 30.0,
        wish: Callable[[], str | None] = lambda: None,
    ) -> None:
        """wish: why this rank wants to stop."""
        self._store, self._rank, self._hosts, self._lost_after = store, rank, hosts, lost_after
        self._wish = wish
        self.beat: Callable[[], None] = lambda: None
        """Called every few seconds."""
        self.last_words: Callable[[], None] = lambda: None
        """Called before a thread of this pulse ends the process."""
        self.cut_off = False
        """Whether the store does not answer any more: who asks it again may wait for ever."""
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop_reason: str | None = None
        self._failure: Failure | None = None
        self._count = 0
        self._answers = 0
        self._last_error = ""
        self._wished: str | None = None
        self._told = False
        self._ending = threading.Event()
        # Two, since a store whose node has vanished need not fail: a question to it may just never be answered.
        # And a shared disk that hangs for a minute, which only the first asks, must not look like a death.
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._talker = threading.Thread(target=self._talk, name="pulse-talk", daemon=True)

    def begin(self) -> None:
        """All ranks call it together with the store, once `wish` can be asked."""
        if self._store is not None:
            self._store.set(f"pulse/{self._rank}", "0")
            self._store.compare_set("stop", "", "")
            self._store.compare_set("failed", "", "")
            self._talker.start()
        self._thread.start()

    def end(self) -> None:
        """No more signs of life: this rank is about to leave, and has told why."""
        self._ending.set()
        for thread in (self._thread,) if self.cut_off else (self._thread, self._talker):
            if thread.is_alive() and threading.current_thread() is not thread:
                thread.join(timeout=_GRACE)

    @property
    def stop_reason(self) -> str | None:
        """Why some rank wants to stop."""
        return self._stop_reason

    def require_well(self) -> None:
        """Raise where another rank has failed or is lost."""
        failure = self._failure
        if failure is not None and failure.rank != self._rank:
            raise WorldError(f"rank {failure.rank} ({failure.host}): {failure.message}", failure.code, True)

    def fail(self, message: str, code: int) -> None:
        """Tell the others that this rank ends, and why; the first to tell is believed."""
        if self._store is not None and self._failure is None:
            self._tell(Failure(self._rank, self._hosts[self._rank], message, code))

    def _tell(self, failure: Failure) -> None:
        assert self._store is not None
        first = self._store.compare_set("failed", "", json.dumps(vars(failure)))
        self._failure = Failure(**json.loads(first))

    def _run(self) -> None:
        next_beat, answers, silent = 0.0, 0, 0.0
        while not self._ending.is_set():
            self._wished = self._wish()
            if time.monotonic() >= next_beat:
                self.beat()
                next_beat = time.monotonic() + _SECONDS_BETWEEN_BEATS
            # Looks are counted, not time: a process that was held still itself has not missed any answer.
            silent = silent + _PERIOD if answers == self._answers else 0.0
            answers = self._answers
            if self._store is not None and self._failure is None and silent > self._lost_after:
                self.cut_off = True
                self._failure = Failure(0, self._hosts[0], _unheard(silent, self._last_error), 1)
            if self._failure is not None and self._failure.rank != self._rank:
                self._end_the_process(self._failure)
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

    def _exchange(self, store: Store) -> None:
        if self._wished is not None and not self._told:
            store.compare_set("stop", "", self._wished)
            self._told = True
        self._count += 1
        store.set(f"pulse/{self._rank}", str(self._count))
        watched = range(len(self._hosts)) if self._rank == 0 else (0,)
        stop, failed, *pulses = store.multi_get(["stop", "failed", *(f"pulse/{rank}" for rank in watched)])
        self._stop_reason = stop.decode() or None
        if failed:
            self._failure = Failure(**json.loads(failed))
            return
        now = time.monotonic()
        for rank, pulse in zip(watched, pulses, strict=True):
            known = self._seen.get(rank)
            if known is None or known[0] != pulse:
                self._seen[rank] = (pulse, now)
            elif rank != self._rank and now - known[1] > self._lost_after:
                self._tell(Failure(rank, self._hosts[rank], _unheard(now - known[1]), 1))
                return

    def _end_the_process(self, failure: Failure) -> None:
        """The main thread raises at its next look; where it cannot look, inside a collective, this ends it."""
        if self._ending.wait(_GRACE):
            return
        # Into this rank's log, and on rank 0 to the terminal too.
        print(f"incv: error: rank {failure.rank} ({failure.host}): {failure.message}", file=sys.stderr, flush=True)
        self.last_words()
        os._exit(failure.code)


def _unheard(seconds: float, why: str = "") -> str:
    because = f" ({why.splitlines()[0]})" if why else ""
    return (
        f"no sign of life for {seconds:.0f} s{because}: its process was killed, its node is gone or the network is "
        "down. The same command goes on from the last checkpoint"
    )
