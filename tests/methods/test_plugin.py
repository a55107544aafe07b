"""A training method from another package: installed by pip, named in a recipe, treated like a built-in."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY, toy_package_folder
from trainer.run.export import load_network

pytestmark = pytest.mark.slow
RECIPE = REPOSITORY / "recipes" / "tiny.yaml"
METHOD = "toy_pair"
KEYS = (f"methods=[standard,{METHOD}]", f"{METHOD}.epochs=20", f"{METHOD}.smoothing=0.2", "execution.threads=1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that have the package."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(toy_package_folder(), folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", folder / "source"], check=True, timeout=120)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), str(REPOSITORY)])}


def incv(environment: dict[str, str], folder: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "trainer", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def weights(run: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in (run / "methods" / METHOD).rglob("model.safetensors")}


@pytest.fixture(scope="module")
def finished(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    done = incv(installed, folder, "run", "-c", str(RECIPE), *KEYS, "--run-dir", "whole")
    assert done.returncode == 0, done.stderr
    assert "Toy pair" in done.stdout
    return folder


def test_it_is_evaluated_exported_and_reported(finished: Path) -> None:
    run = finished / "whole"
    training = json.loads((run / "methods" / METHOD / "training.json").read_text())
    assert training["smoothing"] == 0.2
    selected = json.loads((run / "report.json").read_text())["selection"]["selected"]
    assert training["selected"] == selected
    evaluation = json.loads((run / "evaluation.json").read_text())["test"]
    assert len(evaluation[METHOD]["networks"]) == 2
    assert evaluation[METHOD]["ensemble"] is not None
    networks = [load_network(run / "methods" / METHOD / "export" / f"model_{letter}") for letter in "ab"]
    assert all(not network.training for network in networks)
    assert "Toy pair" in (run / "report.html").read_text()


def test_a_dry_run_plans_and_estimates_it(installed: dict[str, str], finished: Path) -> None:
    arguments = ["run", "-c", str(RECIPE), *KEYS, "--dry-run", "--gpus", "1,8", "execution.device=auto"]
    done = incv(installed, finished, *arguments, "--run-dir", "planned")
    assert done.returncode == 0, done.stderr
    assert f"{METHOD} " in done.stdout
    assert "2 networks, 20 epochs" in done.stdout
    assert any(METHOD in line for line in done.stdout.partition("estimate")[2].splitlines()), done.stdout
    assert not (finished / "planned").exists()


def test_a_killed_run_resumes_to_the_same_weights(installed: dict[str, str], finished: Path) -> None:
    command = [sys.executable, "-m", "trainer", "run", "-c", str(RECIPE), *KEYS, "--run-dir", "killed"]
    process = subprocess.Popen(command, cwd=finished, env=installed, stderr=subprocess.DEVNULL)
    metrics = finished / "killed" / "methods" / METHOD / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 10):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = incv(installed, finished, "run", "-c", str(RECIPE), *KEYS, "--run-dir", "killed")
    assert done.returncode == 0, done.stderr
    starts = json.loads((finished / "killed" / "manifest.json").read_text())["starts"]
    assert METHOD in starts[1]["resumed"]
    assert weights(finished / "killed") == weights(finished / "whole")


def test_two_ranks_train_it(installed: dict[str, str], finished: Path) -> None:
    keys = (*KEYS, "execution.world=2")
    done = incv(installed, finished, "run", "-c", str(RECIPE), *keys, "--run-dir", "two", ranks=2)
    assert done.returncode == 0, done.stderr
    selections = [json.loads((finished / run / "incv.json").read_text()) for run in ("whole", "two")]
    assert selections[0]["selection_checksum"] == selections[1]["selection_checksum"]
    assert weights(finished / "two").keys() == {"model_a", "model_b"}


def test_without_the_package_the_recipe_is_refused(finished: Path) -> None:
    done = incv(dict(os.environ), finished, "validate", "-c", str(RECIPE), *KEYS)
    assert done.returncode == 2
    assert METHOD in done.stderr
