"""Launchers are recognised by their environment variables; contradictions with them or the recipe are refused."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shards.errors import ConfigError
from tests.support import REPOSITORY
from trainer.distributed.launch import (
    Launch,
    check_launcher_options,
    check_world_size,
    detect_launch,
    get_launch_time,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "MASTER_ADDR": "n1",
}


def test_nobody() -> None:
    launch = detect_launch({"HOME": "/"})
    assert launch == Launch("alone")
    assert not launch.stop_exits_zero


def test_torchrun() -> None:
    launch = detect_launch(TORCHRUN)
    assert launch == Launch("torchrun", 3, 4, 1, 2, "n1", 29500)
    assert launch.stop_exits_zero


def test_accelerate_speaks_like_torchrun_and_says_its_precision() -> None:
    launch = detect_launch(TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"})
    assert launch == Launch("accelerate", 3, 4, 1, 2, "n1", 29500)
    assert launch.stop_exits_zero


def test_accelerate_with_one_process() -> None:
    launch = detect_launch({"ACCELERATE_MIXED_PRECISION": "no"})
    assert launch == Launch("accelerate")
    assert not launch.stop_exits_zero


def test_accelerate_that_was_asked_for_two_and_started_one() -> None:
    told = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="configured for several processes but started one") as error:
        detect_launch(told)
    assert "--multi_gpu" in str(error.value)


ACCELERATE = """
import os, subprocess, sys
of_child = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
code = "from trainer.distributed.launch import detect_launch; detect_launch()"
sys.exit(subprocess.call([sys.executable, "-c", code], env=of_child))
"""


@pytest.mark.parametrize(("variable", "refused"), [("MASTER_ADDR", False), ("OTHER_MASTER_ADDR", True)])
def test_an_address_from_the_shell_is_not_one_from_accelerate(variable: str, refused: bool) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), variable: "127.0.0.1"}
    done = subprocess.run([sys.executable, "-c", ACCELERATE], env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == refused
    assert ("configured for several processes but started one" in done.stderr) == refused


def test_srun() -> None:
    launch = detect_launch(SRUN)
    assert (launch.launcher, launch.rank, launch.size) == ("srun", 5, 8)
    assert (launch.local_rank, launch.local_size, launch.master_address) == (1, 4, "n1")
    assert not launch.stop_exits_zero


def test_a_single_task_of_srun_needs_no_address() -> None:
    assert detect_launch(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Launch("srun")


def test_the_batch_script_itself_is_alone() -> None:
    """sbatch sets SLURM_PROCID too, and no step."""
    assert detect_launch({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17"}) == Launch("alone")


def test_torchrun_inside_of_srun_is_torchrun() -> None:
    assert detect_launch(SRUN | TORCHRUN).launcher == "torchrun"


def test_steps_and_jobs_of_a_node_have_ports_of_their_own() -> None:
    ports = [
        detect_launch(SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port
        for job, step in (("17", "0"), ("17", "1"), ("18", "0"), ("19", "0"))
    ]
    assert len(set(ports)) == 4
    assert all(1024 < port < 65536 for port in ports)
    assert detect_launch(SRUN | {"MASTER_PORT": "4242"}).master_port == 4242


def test_srun_without_an_address_and_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="set MASTER_ADDR"):
        detect_launch({name: value for name, value in SRUN.items() if name != "MASTER_ADDR"})


def test_a_rank_without_a_world() -> None:
    with pytest.raises(ConfigError, match=r"RANK .*WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        detect_launch({"RANK": "0"})


@pytest.mark.parametrize(("told", "name"), [(TORCHRUN, "WORLD_SIZE"), (SRUN, "SLURM_LOCALID")])
def test_a_variable_that_is_no_number(told: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'two', not a number"):
        detect_launch(told | {name: "two"})


def test_the_promised_world() -> None:
    launch = detect_launch(TORCHRUN)
    check_world_size(launch, None)
    check_world_size(launch, 4)
    with pytest.raises(ConfigError, match=r"execution\.world is 8, .*torchrun.* started 4"):
        check_world_size(launch, 8)
    with pytest.raises(ConfigError, match=r"execution\.world is 2, .*alone.* started 1"):
        check_world_size(detect_launch({}), 2)


@pytest.mark.parametrize(("precision", "said"), [("fp32", "no"), ("bf16", "no"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_a_launcher_that_does_not_contradict_the_recipe(precision: str, said: str) -> None:
    check_launcher_options(precision, {"ACCELERATE_MIXED_PRECISION": said})
    check_launcher_options(precision, {})


@pytest.mark.parametrize(("precision", "said"), [("fp32", "bf16"), ("bf16", "fp16"), ("fp32", "fp8")])
def test_a_contrary_precision_names_both(precision: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"mixed_precision {said}.*precision: {precision}"):
        check_launcher_options(precision, {"ACCELERATE_MIXED_PRECISION": said})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend no"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "batch.micro"),
    ],
)
def test_other_settings_of_accelerate_that_nobody_would_obey(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_launcher_options("fp32", {name: value})


def test_when_the_launcher_began() -> None:
    assert get_launch_time({"INCV_LAUNCHED": "1700000000.5"}) == 1700000000.5
    with pytest.raises(ConfigError, match="INCV_LAUNCHED is 'noon', not a Unix time"):
        get_launch_time({"INCV_LAUNCHED": "noon"})


def test_a_worker_of_an_agent_asks_when_the_agent_began() -> None:
    """This process is the agent of the one it starts: it began earlier, and that is what the worker says."""
    program = "from trainer.distributed.launch import get_launch_time; print(get_launch_time())"
    began = time.time()
    found = [
        float(subprocess.run([sys.executable, "-c", program], env=told, capture_output=True, check=True).stdout)
        for told in (os.environ | TORCHRUN, dict(os.environ))
    ]
    assert found[0] == pytest.approx(get_launch_time({}), abs=0.05)
    assert found[0] < began
    assert found[1] > began - 2.0  # the kernel's clock of process starts is coarse
    assert found[1] > found[0]
