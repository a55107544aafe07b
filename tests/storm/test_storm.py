"""Twenty disturbances of a two-rank run under torchrun: each run ends with the bits of the undisturbed one.

`STORM_SEED=N` draws other moments. One line a disturbance goes to storm.log in the tests' temporary folder, and to
the terminal (`pytest -s`).
"""

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shards.durable import read_json
from tests.support import processes, storm_processes
from tests.support.storm_moments import SEED, STORMS, TIMEOUT_OF_LONG_WAIT, Moment, Storm
from tests.support.storm_processes import Weather
from trainer.training.loop import checkpoint_interval


class Passage:
    """A run through its storm: started again with the same command until it is finished."""

    def __init__(self, storm: Storm, ground: Path) -> None:
        self.storm, self.ground = storm, ground
        name = storm.name.replace(" ", "_")
        self.run_dir, self.log = ground / name, ground / f"{name}.log"
        self.weather = Weather(ground / f"{name}.weather", storm.moments, self.run_dir)
        self.launches = 0
        self._come: list[Moment] = []

    def run_to_end(self) -> None:
        arguments = storm_processes.command(
            self.run_dir, storm_processes.ONE_NODE, self.weather.plan, self.storm.overrides
        )
        finished = False
        while not finished:
            before = len(self._come)
            self.launches += 1
            process = storm_processes.start(arguments, self.ground, self.log)
            code = self._until_end(process)
            storm_processes.require_no_orphans(self.run_dir)
            asked = [moment for moment in self._come[before:] if moment.kind not in ("SIGKILL", "none")]
            finished = not asked
            if finished:
                assert code == 0, storm_processes.tail(self.log)
            else:
                self._require_stopped(asked[-1])

    def _until_end(self, process: "subprocess.Popen[bytes]") -> int:
        return storm_processes.until_end(
            process, lambda: self._come.extend(self.weather.look()), self.log, self.run_dir
        )

    def _require_stopped(self, moment: Moment) -> None:
        """Where it was asked, with the reason it was given, and everything it needs to go on."""
        assert (self.run_dir / "stopped.json").exists(), storm_processes.tail(self.log)
        marker = read_json(self.run_dir / "stopped.json")
        assert marker["reason"] == moment.kind.split(" to ")[0]
        assert marker["stage"] == moment.stage, "the moment was too late in its stage"
        processes.require_whole(self.run_dir)
        if moment.slow is not None:
            self._require_one_predicts_and_one_trains(moment, marker)

    def _require_one_predicts_and_one_trains(self, moment: Moment, marker: dict[str, Any]) -> None:
        folds = [self.run_dir / "rounds" / "0" / f"fold{fold}" for fold in (0, 1)]
        assert marker["where"] == "incv/0/0 predict"
        assert self.weather.places[moment.name][1].startswith("incv/0/1 "), self.weather.places
        assert processes.newest_durable_step(folds[0]) == 25
        assert 0 < processes.newest_durable_step(folds[1]) < 25
        assert not any((fold / "predictions.parquet").exists() for fold in folds)

    def summary(self) -> Iterator[str]:
        """One line a disturbance, and what came of it."""
        if not (self.run_dir / "manifest.json").exists():
            return
        starts = read_json(self.run_dir / "manifest.json")["starts"]
        hit = [moment for moment in self._come if moment.kind != "none"]
        for moment, start, after in zip(hit, starts, starts[1:], strict=False):
            last = self.weather.record(moment, ".died") or self.weather.record(moment) or {}
            yield (
                f"{self.storm.name}: {moment.phase}: {moment.kind} at {last['where']} {last['number']}, rank "
                f"{moment.rank}; ranks at {self.weather.places[moment.name]}; this start executed "
                f"{sum(start['steps_executed'].values())} steps, ended {start['ended']}; the next went on from "
                f"{after['resumed']}"
            )
        ended = f"{self.launches} launches, {len(starts)} starts"
        yield f"{self.storm.name}: end: {ended}, {starts[-1]['ended']}; moments {len(self._come)}"


@pytest.fixture(scope="session")
def storm_log(storm_ground: Path) -> Path:
    path = storm_ground / "storm.log"
    path.write_text(f"STORM_SEED={SEED}\n")
    return path


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "storm",
    [pytest.param(s, id=s.name, marks=pytest.mark.cluster if s is STORMS[0] else pytest.mark.storm) for s in STORMS],
)
def test_a_storm_changes_nothing(storm: Storm, storm_ground: Path, calm: Path, storm_log: Path) -> None:
    passage = Passage(storm, storm_ground)
    try:
        passage.run_to_end()
    finally:
        storm_processes.end_all(passage.run_dir)
        lines = list(passage.summary())
        with storm_log.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)
        print(f"\nSTORM_SEED={SEED}", *lines, f"({storm_log})", sep="\n")
    _require_all_hit(passage)
    processes.require_same_results(passage.run_dir, calm)
    processes.require_whole(passage.run_dir)
    assert not (passage.run_dir / "stopped.json").exists()
    assert not (passage.run_dir / "STOP").exists()
    _require_few_steps_twice(passage, calm)
    if storm is STORMS[-1]:
        _require_a_long_wait(passage.run_dir)


def _require_all_hit(passage: Passage) -> None:
    """Every moment came, and each is a start of its own in the manifest."""
    storm = passage.storm
    assert {moment.name for moment in storm.moments} == passage.weather.places.keys()
    for moment in storm.moments:
        last = passage.weather.record(moment, ".died")
        assert last is None or last["where"].split("/")[0].split()[0] == moment.stage, last
    starts = read_json(passage.run_dir / "manifest.json")["starts"]
    kinds = Counter(moment.kind for moment in storm.moments if moment.kind != "none")
    assert len(starts) == 1 + kinds.total(), starts
    assert Counter(start["ended"] for start in starts)["stopped"] == kinds.total() - kinds["SIGKILL"]
    assert starts[-1]["ended"] == "finished"


def _require_few_steps_twice(passage: Passage, calm: Path) -> None:
    """Of every fold and method alone; only what struck it, or its neighbour, may have cost it steps."""
    (once,) = (start["steps_executed"] for start in read_json(calm / "manifest.json")["starts"])
    executed: Counter[str] = Counter()
    for start in read_json(passage.run_dir / "manifest.json")["starts"]:
        executed.update(start["steps_executed"])
    assert executed.keys() == once.keys()
    for training, steps in once.items():
        struck = sum(moment.delays(training) for moment in passage.storm.moments)
        most = steps + struck * 2 * checkpoint_interval(steps, processes.CHECKPOINT_EVERY)
        assert steps <= executed[training] <= most, training


def _require_a_long_wait(run_dir: Path) -> None:
    files = [run_dir / "rounds" / "0" / f"fold{fold}" / "predictions.parquet" for fold in (0, 1)]
    first, second = (file.stat().st_mtime for file in files)
    print(f"long wait: fold 0 waited {second - first:.1f} s, collectives had {TIMEOUT_OF_LONG_WAIT:g} s")
    assert second - first > TIMEOUT_OF_LONG_WAIT + 1


def test_the_storm_is_the_one_that_was_promised() -> None:
    moments = [moment for storm in STORMS for moment in storm.moments]
    assert len(moments) == 20
    phases = Counter(moment.phase for moment in moments)
    assert min(phases["train"], phases["predict"], phases["evaluate"]) >= 3
    assert sum(moment.in_coteaching for moment in moments) >= 6
    first = {moment.kind.split(" to ")[0] for moment in STORMS[0].moments}
    assert first == {"SIGKILL", "SIGTERM", "SIGUSR2", "STOP file"}
    assert {moment.phase for moment in STORMS[0].moments} == {"train", "predict", "evaluate"}
    assert len(STORMS[0].moments) == 6
