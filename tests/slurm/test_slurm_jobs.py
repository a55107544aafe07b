"""Jobs on a real Slurm of two nodes: undisturbed, preempted, out of time, cancelled, stuck."""

import pytest

from shards.durable import read_json
from tests.support import processes
from tests.support.slurm_runs import held_still

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_a_job_runs_over_both_nodes_to_its_report(runs, uninterrupted):
    (start,) = runs.starts("undisturbed")
    assert (start["world"], start["ended"]) == (2, "finished")
    assert (uninterrupted / "report.html").exists()
    runs.require_no_process("undisturbed")


def test_a_requeued_job_goes_on_with_shards_on_local_disks(runs, uninterrupted):
    local = runs.folder / "it's a local disk"
    job = runs.submit("requeued", INCV_STAGE=str(local))
    runs.wait_for_training(job, "requeued/methods/standard")
    runs.cluster.answer("scontrol", "requeue", job)
    runs.wait_for_restart(job)
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 1), runs.log(job)
    starts = runs.starts("requeued")
    assert [start["world"] for start in starts] == [2, 2]
    assert starts[-1]["ended"] == "finished"
    assert str(local) in (runs.folder / "requeued" / "config.resolved.yaml").read_text().replace("''", "'")
    processes.require_same_results(runs.folder / "requeued", uninterrupted)
    runs.require_no_process("requeued")


def test_a_job_near_its_time_limit_saves_and_requeues_itself(runs, uninterrupted):
    """The limit is lowered when training has begun; ranks hold still until the signal comes, up to 30 s later."""
    job = runs.submit("out_of_time")
    runs.wait_for_training(job, "out_of_time/methods/coteaching")
    with held_still("out_of_time"):
        runs.cluster.answer("scontrol", "update", f"JobId={job}", "TimeLimit=5")  # the signal comes 300 s earlier
        runs.wait_until(job, lambda: "got USR2" in runs.log(job))
        stop = runs.folder / "out_of_time" / "STOP"  # the script writes it after that line
        runs.wait_until(job, stop.exists, seconds=30)
    runs.wait_for_restart(job)
    runs.cluster.answer("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    assert read_json(runs.folder / "out_of_time" / "stopped.json")["stage"] == "coteaching"
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("COMPLETED", 0, 1), runs.log(job)
    assert [start["ended"] for start in runs.starts("out_of_time")] == ["stopped", "finished"]
    processes.require_same_results(runs.folder / "out_of_time", uninterrupted)
    runs.require_no_process("out_of_time")


@pytest.mark.storm
def test_after_scancel_the_same_line_again_finishes(runs, uninterrupted):
    job = runs.submit("cancelled")
    runs.wait_for_training(job, "cancelled/rounds/1/fold0")
    runs.cluster.answer("scancel", job)
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.restarts) == ("CANCELLED", 0), runs.log(job)
    runs.require_no_process("cancelled")
    again = runs.submit("cancelled")
    assert runs.wait_for_end(again).state == "COMPLETED", runs.log(again)
    processes.require_same_results(runs.folder / "cancelled", uninterrupted)
    assert runs.starts("cancelled")[0]["ended"] in ("stopped", None)


@pytest.mark.storm
def test_three_starts_without_a_later_step_end_the_chain(runs, monkeypatch):
    """A file that is sourced before each start asks it to stop at once, and the next step never comes."""
    one_step_an_epoch = "batch.global=256"
    monkeypatch.chdir(runs.folder)
    monkeypatch.setenv("INCV_LAUNCHED", "0")  # before the STOP file
    assert processes.run_here(["labels", *runs.arguments("stuck", one_step_an_epoch)])[0] == 0
    (runs.folder / "stuck" / "STOP").touch()
    code, error = processes.run_here(["run", *runs.arguments("stuck", one_step_an_epoch)])
    assert code == 75, error  # inside the predict pass after its first step
    setup = runs.folder / "stopping.sh"
    setup.write_text(
        (runs.folder / "setup.sh").read_text() + "if [[ -n ${SLURM_STEP_ID:-} ]]; then touch stuck/STOP; fi\n"
    )
    job = runs.submit("stuck", one_step_an_epoch, nodes=1, INCV_SETUP=str(setup))
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("FAILED", 1, 2), runs.log(job)
    assert "3 starts in a row" in runs.log(job)
    assert [start["ended"] for start in runs.starts("stuck")] == ["finished", *["stopped"] * 4]


@pytest.mark.storm
def test_a_job_has_a_process_for_each_gpu_it_is_granted(runs):
    """One stage alone, on a cluster whose GPUs exist in its books only."""
    job = runs.submit("granted", "labels", gpus=2, INCV_PROCS_PER_NODE="3")
    assert runs.wait_for_end(job).state == "COMPLETED", runs.log(job)
    assert [start["world"] for start in runs.starts("granted")] == [4]


def test_a_wrong_recipe_ends_at_once(runs):
    job = runs.submit("refused", "incv.epoch=3")
    ended = runs.wait_for_end(job)
    assert (ended.state, ended.exit_code, ended.restarts) == ("FAILED", 2, 0)
    assert "did you mean `incv.epochs`" in runs.log(job)
    assert not (runs.folder / "refused").exists()
