"""`incv doctor` without a run and `incv env`, as commands."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import RECIPES, REPOSITORY
from tests.support.command_line import Answer, contents
from trainer.doctor.environment import describe_environment

Incv = Callable[..., Answer]


def test_doctor_examines_this_machine(incv: Incv, playground: Path) -> None:
    before = contents(playground)
    answer = incv("doctor", "--shards", "data/shards/digits-test", "--folder", "runs")
    assert (answer.code, answer.err) == (0, "")
    for subject in (
        "torch",
        "GPU",
        "NCCL",
        "DALI",
        "DeepSpeed",
        "memory",
        "disk",
        "file system",
        "shards",
        "launcher",
    ):
        assert f"  {subject}" in answer.out
    assert answer.out.splitlines()[-1].startswith("verdict: ")
    assert contents(playground) == before


def test_a_broken_torch_is_named_and_the_rest_is_examined(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    command = [sys.executable, "-m", "trainer", "doctor"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert "undefined symbol" in answer.stdout
    assert "file system" in answer.stdout
    assert "1 problem to solve before a run: torch" in answer.stdout
    assert "Traceback" not in answer.stdout + answer.stderr


def test_options_of_a_run_and_of_a_machine_do_not_mix(incv: Incv, playground: Path) -> None:
    for words in (["--progress"], ["--run-dir", "run", "--shards", "x"], ["--run-dir", "run", "--folder", "x"]):
        answer = incv("doctor", *words)
        assert (answer.code, answer.out) == (2, "")
        assert "--run-dir" in answer.err


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_doctor_under_launchers(launcher: str, tmp_path: Path) -> None:
    start = {
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        "accelerate": [
            *("-m", "accelerate.commands.launch", "--config_file", str(RECIPES / "accelerate" / "cpu.yaml")),
            *("--main_process_port", "0"),
        ],
    }[launcher]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, "-m", "trainer", "doctor"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert f"{launcher}, 2 ranks, gloo: all-reduce is right" in answer.stdout
    assert answer.stdout.count("verdict: ") == 1


def test_env_prints_what_a_bug_report_needs(incv: Incv) -> None:
    answer = incv("env")
    assert (answer.code, answer.err) == (0, "")
    facts = dict(line.split(": ", 1) for line in answer.out.splitlines() if ": " in line)
    assert facts["PyTorch version"].startswith(version("torch"))
    assert f"pyarrow {version('pyarrow')}" in facts["packages"]
    assert facts["launcher"] == "alone, rank 0 of 1"
    assert {"incv", "python", "OS", "memory", "folder", "Nvidia driver version", "variables"} <= facts.keys()


def test_env_shows_no_secrets_no_home_and_no_control_characters() -> None:
    environ = {
        "HOME": str(Path.cwd().parent),
        "WANDB_API_KEY": "secret1",
        "INCV_TOKEN": "secret2",
        "AWS_SECRET_ACCESS_KEY": "secret3",
        "NCCL_DEBUG": "INFO\x1b[31m\nfake: line",
        "RANK": "x",
    }
    text = describe_environment(environ)
    assert "secret" not in text
    assert "INCV_TOKEN='(hidden)'" in text
    assert f"folder: ~/{Path.cwd().name}" in text
    assert "\x1b" not in text
    assert not any(line.startswith("fake") for line in text.splitlines())
    assert "launcher: error: " in text


def test_env_names_a_broken_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: undefined symbol')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert describe_environment().endswith("\ntorch: ImportError: libtorch_cpu.so: undefined symbol")
