"""A recipe as a chain of jobs with dependencies: pack, train, report; a failure cancels its dependents."""

import pytest

from tests.support import REPOSITORY, processes
from tests.support.slurm_cluster import wait_until
from tests.support.slurm_runs import EXECUTION, PATIENCE, RECIPE

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]

PIPELINE = REPOSITORY / "slurm" / "pipeline.sh"
PACKING = {"INCV_PACK_TASKS": "2", "INCV_PACK_OPTIONS": "--mem-per-cpu=100 --cpus-per-task=1 --time=5"}


def _submit(runs, name, *arguments):
    """The numbers of the jobs that train, in the order in which they wait for each other."""
    line = ["--nodes=2", "--time=20", "--", *RECIPE, *EXECUTION, *PATIENCE, *arguments, "--run-dir", name]
    variables = {**PACKING, "INCV_SETUP": str(runs.folder / "setup.sh")}
    said = runs.cluster.answer(str(PIPELINE), *line, cwd=runs.folder, **variables).splitlines()
    return [one.split()[0] for one in said if " packs " not in one]


def test_a_pipeline_packs_trains_and_reports(runs, uninterrupted):
    """Two splits packed by two tasks each, into folders with names that need quotes; then a job a stage."""
    shards = {"data.train.shards": "packed/the train's", "data.eval.test.shards": "packed/the test's"}
    overrides = [f'{key}="{folder}"' for key, folder in shards.items()]
    jobs = _submit(runs, "pipeline", *overrides)
    assert len(jobs) == 6  # labels, incv, three methods, the rest
    assert runs.wait_for_end(jobs[-1], seconds=550).state == "COMPLETED"
    starts = runs.starts("pipeline")
    assert [start["world"] for start in starts] == [1, 2, 2, 2, 2, 2]
    assert all((runs.folder / folder / "dataset.json").exists() for folder in shards.values())
    assert (runs.folder / "pipeline" / "report.html").exists()
    processes.require_same_results(runs.folder / "pipeline", uninterrupted)


def test_what_waits_for_a_failed_job_is_removed(runs):
    """The training images lie nowhere: packing fails."""
    missing = ("data.train.source=image_folder", "data.train.root=nowhere", "data.train.shards=packed/nothing")
    jobs = _submit(runs, "failed", *missing)
    wait_until(lambda: {runs.cluster.job(job).state for job in jobs} == {"CANCELLED"}, 120, pause=1)
    assert not (runs.folder / "failed").exists()
