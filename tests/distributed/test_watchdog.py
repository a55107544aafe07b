"""Heartbeats over a real store: stops and failures spread, a silent rank is found, and polling stays cheap."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from trainer.distributed import watchdog as watchdog_module
from trainer.distributed.watchdog import Watchdog, WorldError

HOSTS = ("n0", "n1", "n2")
SOON = 5.0
Make = Callable[..., Watchdog]


class CountingStore:
    """A client of a real store that notes how many keys it asks for at a time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.asked: list[list[str]] = []
        self.silent = False

    def set(self, key: str, value: str) -> None:
        if not (self.silent and key.startswith("heartbeat/")):  # a rank whose words do not arrive any more
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked.append(keys)
        return list(self._store.multi_get(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def client(server: dist.TCPStore) -> CountingStore:
    return CountingStore(dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=10)))


@pytest.fixture
def begun(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes a rank's watchdog, which must not exit this process after a failure."""
    monkeypatch.setattr(watchdog_module, "_GRACE", 600.0)
    made_here: list[Watchdog] = []

    def make(rank: int, get_stop_reason: Callable[[], str | None] = lambda: None, **options: object) -> Watchdog:
        store = options.pop("store", None) or client(server)
        made = Watchdog(store, rank, HOSTS, get_stop_reason=get_stop_reason, **options)  # type: ignore[arg-type]
        made.start()
        made_here.append(made)
        return made

    yield make
    for each in made_here:
        each._stopping.set()


def soon(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_a_stop_spreads(begun: Make) -> None:
    wishes: list[str] = []
    ranks = [
        begun(rank, (lambda: wishes[-1] if wishes else None) if rank == 2 else lambda: None) for rank in range(3)
    ]
    time.sleep(0.6)
    assert all(rank.stop_reason is None for rank in ranks)
    wishes.append("SIGUSR2")
    assert soon(lambda: all(rank.stop_reason == "SIGUSR2" for rank in ranks))


def test_the_first_reason_counts(begun: Make) -> None:
    later: list[str] = []
    ranks = [begun(0, lambda: "STOP file"), begun(1, lambda: later[0] if later else None), begun(2)]
    assert soon(lambda: all(rank.stop_reason == "STOP file" for rank in ranks))
    later.append("SIGTERM")
    time.sleep(0.6)
    assert [rank.stop_reason for rank in ranks] == ["STOP file"] * 3


def test_a_failure_spreads_with_its_words_and_its_code(begun: Make) -> None:
    ranks = [begun(rank) for rank in range(3)]
    for rank in ranks:
        rank.raise_if_failed()
    ranks[1].fail("the shards are gone", 3)
    for other in (ranks[0], ranks[2]):
        assert soon(lambda other=other: failure_of(other) is not None)  # type: ignore[misc]
        failure = failure_of(other)
        assert failure is not None
        assert str(failure) == "rank 1 (n1): the shards are gone"
        assert failure.exit_code == 3
        assert failure.from_peer
    ranks[1].raise_if_failed()  # it says so itself


def test_the_first_failure_is_believed(begun: Make) -> None:
    ranks = [begun(rank) for rank in range(3)]
    ranks[1].fail("the shards are gone", 3)
    ranks[2].fail("connection closed by peer", 1)
    assert soon(lambda: str(failure_of(ranks[0])) == "rank 1 (n1): the shards are gone")
    time.sleep(0.6)
    assert str(failure_of(ranks[0])) == "rank 1 (n1): the shards are gone"
    ranks[2].raise_if_failed()  # it ends by itself, with words of its own


def failure_of(watchdog: Watchdog) -> WorldError | None:
    try:
        watchdog.raise_if_failed()
    except WorldError as error:
        return error
    return None


def test_a_silent_rank_is_lost_after_a_while(server: dist.TCPStore, begun: Make) -> None:
    store = client(server)
    ranks = [begun(0, lost_after=1.5), begun(1, lost_after=1.5), begun(2, lost_after=1.5, store=store)]
    time.sleep(2.5)
    assert [failure_of(rank) for rank in ranks] == [None] * 3, "all of them were alive"
    silent_since = time.monotonic()
    store.silent = True
    assert soon(lambda: failure_of(ranks[1]) is not None)
    assert 1.0 < time.monotonic() - silent_since < 4.0
    for other in ranks[:2]:
        assert "rank 2 (n2): no heartbeat for" in str(failure_of(other))
        assert "resume from the last checkpoint" in str(failure_of(other))


def test_the_others_notice_that_rank_0_is_silent(server: dist.TCPStore, begun: Make) -> None:
    store = client(server)
    ranks = [begun(0, lost_after=1.0, store=store), begun(1, lost_after=1.0), begun(2, lost_after=1.0)]
    time.sleep(0.6)
    store.silent = True
    assert soon(lambda: all("rank 0 (n0): no heartbeat" in str(failure_of(rank)) for rank in ranks[1:]))


def test_the_others_look_at_rank_0_alone(server: dist.TCPStore, begun: Make) -> None:
    """So the store is asked for as many keys as there are ranks, not for their square."""
    stores = [client(server) for _ in HOSTS]
    for rank, store in enumerate(stores):
        begun(rank, store=store)
    assert soon(lambda: all(len(store.asked) > 2 for store in stores))
    watched = [{key for keys in store.asked for key in keys if key.startswith("heartbeat/")} for store in stores]
    assert watched == [{"heartbeat/0", "heartbeat/1", "heartbeat/2"}, {"heartbeat/0"}, {"heartbeat/0"}]
    time.sleep(1.0)
    assert all(len(store.asked) < 20 for store in stores), "a few times a second"


def test_alone_it_keeps_the_heartbeat_fresh() -> None:
    beats: list[float] = []
    watchdog = Watchdog()
    watchdog.on_heartbeat = lambda: beats.append(time.monotonic())
    watchdog.start()
    assert soon(lambda: len(beats) == 1)
    watchdog.fail("nobody hears it", 1)
    watchdog.raise_if_failed()
    assert watchdog.stop_reason is None
    watchdog.stop()


HUNG = """
import sys, time
import torch.distributed as dist
from trainer.distributed import watchdog
from trainer.records.logs import configure_logging
configure_logging()
watchdog._GRACE = 0.5
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
watcher = watchdog.Watchdog(store, 1, ("n0", "n1"), lost_after=float(sys.argv[2]))
watcher.on_exit = lambda: print("last words", flush=True)
watcher.start()
print("begun", flush=True)
time.sleep(60)  # a main thread inside a collective, which does not look
"""


@contextmanager
def hung_rank(port: int, lost_after: float) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", HUNG, str(port), str(lost_after)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_hangs_is_ended_when_another_failed(server: dist.TCPStore, begun: Make) -> None:
    with hung_rank(server.port, 30.0) as process:
        begun(0).fail("the shards are gone", 3)
        output, error = process.communicate(timeout=20)
    assert process.returncode == 3
    assert error == "incv: error: rank 0 (n0): the shards are gone\n"
    assert output == "last words\n"


def test_a_rank_is_ended_when_the_store_is_gone() -> None:
    """The process of rank 0 was killed, and the store with it."""
    program = (
        "import time, torch.distributed as dist; s = dist.TCPStore('127.0.0.1', 0, is_master=True, "
        "wait_for_workers=False); print(s.port, flush=True); time.sleep(60)"
    )
    keeper = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        with hung_rank(int(keeper.stdout.readline()), 2.0) as process:
            keeper.kill()
            _, error = process.communicate(timeout=30)
    finally:
        keeper.kill()
        keeper.wait()
    assert process.returncode == 1
    assert "rank 0 (n0): no heartbeat for" in error
