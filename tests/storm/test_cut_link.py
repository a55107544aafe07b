"""torchrun on two nodes whose link is cut: a short cut is survived, a permanent one ends the run."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards.durable import read_json
from tests.support import processes, storm_processes
from tests.support.storm_moments import Moment
from tests.support.storm_processes import LOST_AFTER, Weather
from tests.support.two_nodes import NoNamespaces, TwoNodes, launcher

SECONDS_OF_CUT = 4.0
# After a failure was noticed: 5 s in which ranks may end by themselves, then some for launchers.
SECONDS_TO_END = LOST_AFTER + 12.0


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    try:
        with TwoNodes() as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


class TwoLaunchers:
    """A run with one rank on each node, and the moment at which one says that it has come far enough."""

    def __init__(
        self, nodes: TwoNodes, ground: Path, name: str, moment: Moment, overrides: tuple[str, ...] = ()
    ) -> None:
        self.run_dir = ground / name
        self.logs = [ground / f"{name}-{node}.log" for node in (0, 1)]
        self.weather = Weather(ground / f"{name}.weather", [moment], self.run_dir)
        plan = self.weather.plan
        self.launchers = [
            nodes.start(
                node,
                storm_processes.command(self.run_dir, launcher(node, 0), plan, overrides),
                ground,
                self.logs[node],
            )
            for node in (0, 1)
        ]

    def __enter__(self) -> "TwoLaunchers":
        return self

    def __exit__(self, *_: object) -> None:
        storm_processes.end_all(self.run_dir)
        for process in self.launchers:
            process.wait(10)

    def wait_for_moment(self) -> None:
        processes.wait_until(lambda: bool(self.weather.look()), self.launchers[0])

    def rank(self, node: int) -> int:
        """Process id of a node's only rank."""
        of_run = storm_processes.of_run(self.run_dir)
        (found,) = (process for process in of_run if _parent(process) == self.launchers[node].pid)
        return found

    def error_of(self, node: int) -> str:
        """The error that a rank ended with, on the terminal or, where that belongs to rank 0, in its own log."""
        logs = (self.logs[node], self.run_dir / "logs" / f"rank-{node:04d}.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return "\n".join(line for line in lines if "incv: error" in line)

    def said(self) -> str:
        return "\n".join(f"node {node}:\n{storm_processes.tail(log)}" for node, log in enumerate(self.logs))


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _lives(process: int) -> bool:
    """A zombie does not: its launcher, cut off as well, may never fetch it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _seconds_until_gone(running: list[int], limit: float) -> float:
    """How long until none of these processes lives; fails after `limit`."""
    began = time.monotonic()
    while left := [process for process in running if _lives(process)]:
        assert time.monotonic() - began < limit, f"{left} still run after {limit} s"
        time.sleep(0.05)
    return time.monotonic() - began


def _in_coteaching(rank: int) -> Moment:
    return Moment("far-enough", "train", "none", "coteaching", 20, rank)


@pytest.mark.cluster
def test_a_cut_of_some_seconds_changes_nothing(nodes: TwoNodes, storm_ground: Path, calm: Path) -> None:
    overrides = ("execution.lost_after=30",)  # after the cut TCP itself waits some seconds more
    with TwoLaunchers(nodes, storm_ground, "cut", _in_coteaching(1), overrides) as run:
        run.wait_for_moment()
        nodes.link(1, up=False)
        time.sleep(SECONDS_OF_CUT)
        still_at = run.weather.where_all_are()
        nodes.link(1, up=True)
        codes = [processes.finish(process, 90) for process in run.launchers]
        assert codes == [0, 0], run.said()
        storm_processes.require_no_orphans(run.run_dir)
    assert all(place.startswith("coteaching ") for place in still_at.values()), still_at
    (start,) = read_json(run.run_dir / "manifest.json")["starts"]
    assert (start["ended"], start["world"]) == ("finished", 2)
    processes.require_same_results(run.run_dir, calm)


def _in_a_fold(rank: int) -> Moment:
    """Busy with an epoch of a fold of its own, five steps, for longer than a silent rank is waited for."""
    where = f"incv/0/{rank}"
    return Moment("far-enough", "train", "none", where, 5, rank, slow=where, slow_seconds=LOST_AFTER / 3)


@pytest.mark.storm
@pytest.mark.parametrize("moment", [_in_coteaching(1), _in_a_fold(1)], ids=["inside_a_collective", "outside"])
def test_a_cut_for_good_ends_both_sides(moment: Moment, nodes: TwoNodes, storm_ground: Path) -> None:
    """Neither can know whether it is the other that is gone; nobody hangs."""
    name = f"cut_off_{moment.where.replace('/', '_')}"
    with TwoLaunchers(nodes, storm_ground, name, moment) as run:
        run.wait_for_moment()
        ranks = [run.rank(0), run.rank(1)]
        nodes.link(1, up=False)
        seconds = [_seconds_until_gone(ranks[:1], SECONDS_TO_END), _seconds_until_gone(ranks[1:], SECONDS_TO_END)]
        print(f"\nrank 0 ended {seconds[0]:.1f} s after the cut, rank 1 {seconds[1]:.1f} s after rank 0")
        assert processes.finish(run.launchers[0], 30) != 0
        errors = [run.error_of(node) for node in (0, 1)]
        assert "rank 1" in errors[0], errors
        assert "rank 0" in errors[1], errors
        for node in (0, 1):
            assert "no heartbeat" in errors[node], errors
            assert "resume from the last checkpoint" in errors[node], errors


@pytest.mark.storm
@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_dies_ends_the_other(gone: int, nodes: TwoNodes, storm_ground: Path, calm: Path) -> None:
    """Its launcher and its rank are killed. The same command, on one node now, ends with the bits of the calm run."""
    with TwoLaunchers(nodes, storm_ground, f"gone{gone}", _in_coteaching(gone)) as run:
        run.wait_for_moment()
        survivor = run.rank(1 - gone)
        for process in (run.launchers[gone].pid, run.rank(gone)):
            os.kill(process, signal.SIGKILL)
        seconds = _seconds_until_gone([survivor], SECONDS_TO_END)
        print(f"\nrank {1 - gone} ended {seconds:.1f} s after node {gone} was gone")
        errors = run.error_of(1 - gone)
        assert "no heartbeat" in errors or "no longer respond" in errors, errors
    again, log = storm_processes.command(run.run_dir, storm_processes.ONE_NODE, None), storm_ground / "again.log"
    process = storm_processes.start(again, storm_ground, log)
    try:
        assert storm_processes.until_end(process, lambda: None, log, run.run_dir) == 0, storm_processes.tail(log)
    finally:
        storm_processes.end_all(run.run_dir)
    processes.require_same_results(run.run_dir, calm)
