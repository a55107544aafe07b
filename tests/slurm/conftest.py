"""A two-node Slurm, a folder to submit from, and an undisturbed job."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import REPOSITORY, processes
from tests.support.debian_programs import require_programs
from tests.support.slurm_cluster import PACKAGES, PROGRAMS, SlurmCluster
from tests.support.slurm_runs import Runs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    require_programs(PROGRAMS, PACKAGES)
    started = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="session")
def runs(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Submits recipes/tiny.yaml from a folder where it finds its shards."""
    folder = tmp_path_factory.mktemp("submitted")
    processes.pack_digits(folder)
    programs = Path(sys.executable).parent
    setup = f'export PATH="{programs}:$PATH" PYTHONPATH="{REPOSITORY}" OMP_NUM_THREADS=1\n'
    (folder / "setup.sh").write_text(setup)
    return Runs(cluster, folder)


@pytest.fixture(scope="session")
def uninterrupted(runs: Runs) -> Path:
    """A job over both nodes that nothing interrupted."""
    job = runs.submit("undisturbed")
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 0), runs.log(job)
    return runs.folder / "undisturbed"
