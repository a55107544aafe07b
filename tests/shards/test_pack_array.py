"""Packing as a task array: the same bytes for any number of tasks, in any order, after any kill."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.errors import ConfigError, DataError
from shards.pack import PackOptions, pack, pack_task
from shards.plan import ArrayTask, make_plan
from tests.support import REPOSITORY
from tests.support.pictures import contents, image_tree, list_source

SCRIPT = REPOSITORY / "slurm" / "pack_shards.sh"


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 12))
def test_every_shard_is_the_task_of_one(count, per_shard, tasks):
    plan = make_plan(list_source(1), per_shard, None, 90)
    object.__setattr__(plan, "count", count)
    shards = [shard for number in range(tasks) for shard in ArrayTask(number, tasks).shards(plan)]
    assert sorted(shards) == list(plan.shards)


@pytest.mark.parametrize("text", ["3", "3/3", "-1/3", "1/", "/2", "a/b", "1/0", "0x1/2", "1/2/3"])
def test_a_task_that_is_none(text):
    with pytest.raises(ConfigError, match=r"I/N|numbered"):
        ArrayTask.parse(text)


@settings(max_examples=6, deadline=None)
@given(tasks=st.integers(1, 9), order=st.randoms(use_true_random=False))
def test_any_number_of_tasks_gives_the_bytes_of_the_plain_pack(tmp_path_factory, tasks, order):
    folder = tmp_path_factory.mktemp("array")
    source = list_source(23)
    pack(source, folder / "plain", PackOptions(samples_per_shard=4, resize=8))
    numbers = list(range(tasks))
    order.shuffle(numbers)
    for number in numbers:
        task = ArrayTask(number, tasks)
        pack_task(source, folder / "out", task, PackOptions(samples_per_shard=4, resize=8))
        assert not (folder / "out" / "dataset.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("*.tar")}
    assert len(before) == 6
    pack(source, folder / "out", PackOptions(samples_per_shard=4, resize=8))
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("*.tar")} == before
    assert contents(folder / "out") == contents(folder / "plain")
    pack_task(source, folder / "out", ArrayTask(0, 2), PackOptions(samples_per_shard=4, resize=8))


def test_the_merge_does_what_a_lost_task_has_not_done(tmp_path):
    source = list_source(23)
    pack_task(source, tmp_path / "out", ArrayTask(1, 3), PackOptions(samples_per_shard=4))
    pack(source, tmp_path / "out", PackOptions(samples_per_shard=4))
    pack(source, tmp_path / "plain", PackOptions(samples_per_shard=4))
    assert contents(tmp_path / "out") == contents(tmp_path / "plain")


def test_a_task_of_another_plan_is_refused_and_its_parts_are_never_merged(tmp_path):
    pack_task(list_source(9), tmp_path / "out", ArrayTask(0, 2), PackOptions(samples_per_shard=3))
    with pytest.raises(DataError, match="packed with resize None instead of 8"):
        pack_task(list_source(9), tmp_path / "out", ArrayTask(1, 2), PackOptions(samples_per_shard=3, resize=8))
    # two tasks that began at the same moment, neither seeing the other's plan
    (tmp_path / "out" / ".parts" / "plan.json").unlink()
    pack_task(list_source(9), tmp_path / "out", ArrayTask(1, 2), PackOptions(samples_per_shard=3, resize=8))
    index = pack(list_source(9), tmp_path / "out", PackOptions(samples_per_shard=3, resize=8))
    assert (index.height == 8).all()


SLOW_TASK = """
import sys, time
from pathlib import Path
from tests.support.pictures import ListSource, list_source
from shards.pack import PackOptions, pack, pack_task
from shards.plan import ArrayTask
from shards.errors import InputError

class Slow(ListSource):
    def sample(self, row):
        time.sleep(0.04)
        while Path(__file__).with_name("gate").exists():
            time.sleep(0.01)
        return super().sample(row)

if __name__ == "__main__":
    source, out, options = Slow(list_source(60).rows), Path(sys.argv[1]), PackOptions(samples_per_shard=5)
    try:
        if sys.argv[2] == "all":
            pack(source, out, options)
        else:
            pack_task(source, out, ArrayTask.parse(sys.argv[2]), options)
    except InputError as error:
        print(error)
        sys.exit(error.exit_code)
"""


def _start(script: Path, out: Path, task: str) -> "subprocess.Popen[str]":
    script.write_text(SLOW_TASK)
    places = os.pathsep.join([str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(out), task]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _wait_for_parts(out: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while len(list(out.glob(".parts/shard-*.parquet"))) < count and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)


def test_a_killed_task_beside_a_living_one_is_done_again(tmp_path):
    out, script = tmp_path / "out", tmp_path / "slow_task.py"
    killed, living = (_start(script, out, f"{number}/2") for number in (0, 1))
    _wait_for_parts(out, 3, living)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    # where the living one is in the middle of a shard, the one started again must not sweep its file away
    again = _start(script, out, "0/2")
    assert (again.wait(), living.wait()) == (0, 0)
    pack(list_source(60), out, PackOptions(samples_per_shard=5))
    assert not list(out.glob(".*.tmp*"))
    pack(list_source(60), tmp_path / "plain", PackOptions(samples_per_shard=5))
    assert contents(out) == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("all", "all", "another process is packing"),
        ("0/2", "0/2", "another process is running task 0/2"),
        ("0/2", "all", "another process is packing"),
        ("all", "0/2", "a process without --task is packing"),
    ],
)
def test_two_packers_that_would_do_the_same_are_not_both_let_in(tmp_path, first, second, words):
    out, script = tmp_path / "out", tmp_path / "slow_task.py"
    holder = _start(script, out, first)
    _wait_for_parts(out, 1, holder)
    gate = tmp_path / "gate"
    gate.touch()  # however long the other one takes to start
    other = _start(script, out, second)
    said, _ = other.communicate()
    gate.unlink()
    assert other.returncode == 3
    assert words in said
    assert str(out) in said
    assert holder.wait() == 0
    pack(list_source(60), out, PackOptions(samples_per_shard=5))


SBATCH = """#!/bin/bash
printf '%s\\n' "$@" > "$SUBMITTED"
env | grep ^SLURM_ARRAY >> "$SUBMITTED" || true
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_packs_by_three_tasks_and_submits_the_merge(tmp_path):
    root, out, programs = image_tree(tmp_path / "root with space"), tmp_path / "out", tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(SBATCH)
    (programs / "incv").write_text(f'#!/bin/bash\nexec {sys.executable} -m trainer "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "setup.sh").write_text(f'export PATH="{programs}:$PATH" PYTHONPATH="{REPOSITORY}"\n')
    arguments = ["image_folder", "--root", str(root), "--out", str(out), "--samples-per-shard", "4", "--resize", "8"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "INCV_SETUP": str(tmp_path / "setup.sh"),
        "SUBMITTED": str(tmp_path / "submitted"),
        "SLURM_CPUS_PER_TASK": "1",
        "OMP_NUM_THREADS": "1",
    }
    tasks = []
    for number in range(3):
        array = {"TASK_ID": str(number), "TASK_COUNT": "3", "TASK_MIN": "0", "JOB_ID": "4711"}
        variables = {f"SLURM_ARRAY_{name}": value for name, value in array.items()}
        tasks.append(subprocess.Popen([SCRIPT, *arguments], env={**environment, **variables}, cwd=tmp_path))
    assert [task.wait() for task in tasks] == [0, 0, 0]
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert submitted[:2] == ["--dependency=afterok:4711", "--kill-on-invalid-dep=yes"]
    assert submitted[-len(arguments) - 1 :] == [str(SCRIPT), *arguments]  # and no variable of the array
    assert not (out / "dataset.json").exists()
    subprocess.run([SCRIPT, *arguments], env=environment, cwd=tmp_path, check=True)  # the job that was submitted
    from shards.sources import open_source

    pack(open_source("image_folder", root, "train"), tmp_path / "plain", PackOptions(samples_per_shard=4, resize=8))
    assert contents(out) == contents(tmp_path / "plain")
