"""Packed digits, and an undisturbed run on two ranks."""

from pathlib import Path

import pytest

from tests.support import processes, storm_processes


@pytest.fixture(scope="session")
def storm_ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to start commands in: recipes/tiny.yaml finds its shards there."""
    folder = tmp_path_factory.mktemp("storm")
    processes.pack_digits(folder)
    return folder


@pytest.fixture(scope="session")
def calm(storm_ground: Path) -> Path:
    """The run directory of a calm run: the plain command, two ranks, one thread each."""
    run_dir, log = storm_ground / "calm", storm_ground / "calm.log"
    process = storm_processes.start(
        storm_processes.command(run_dir, storm_processes.ONE_NODE, None), storm_ground, log
    )
    try:
        code = storm_processes.until_end(process, lambda: None, log, run_dir)
        assert code == 0, storm_processes.tail(log)
        storm_processes.require_no_orphans(run_dir)
    finally:
        storm_processes.end_all(run_dir)
    return run_dir
