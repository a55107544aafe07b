"""A full disk: a clear error, exit code 3, nothing half-written; with more space the run resumes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.small_disk import enlarge, mounted_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for one checkpoint of the tiny network, not for three."""
    with mounted_disk(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.slow
def test_a_run_goes_on_once_there_is_room(
    small_disk: Path, playground: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir, log = small_disk / "run", tmp_path / "log"
    code = processes.finish(processes.start(playground, run_dir, log))
    output = log.read_text()
    assert code == 3, output
    assert "the disk is full" in output
    assert str(run_dir) in output
    assert "Traceback" not in output
    processes.require_whole(run_dir)

    enlarge(small_disk, "200m")
    code = processes.finish(processes.start(playground, run_dir, log))
    assert code == 0, log.read_text()
    processes.require_same_results(run_dir, uninterrupted)
    processes.require_whole(run_dir)


def test_a_disk_without_any_room(small_disk: Path, playground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20))
    monkeypatch.chdir(playground)
    code, error = processes.run_here(processes.command(small_disk / "run"))
    assert code == 3, error
    assert "the disk is full" in error
    processes.require_whole(small_disk / "run")
