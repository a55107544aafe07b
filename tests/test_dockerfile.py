"""The Dockerfile: its install steps, run in a fresh environment. The image itself is not built."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

DOCKERFILE = REPOSITORY / "Dockerfile"


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order: (name, argument); continued lines are joined."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def run_steps(prefix: str = "") -> list[str]:
    """Return the RUN steps that begin with `prefix`."""
    return [step for name, step in instructions(DOCKERFILE.read_text()) if name == "RUN" and step.startswith(prefix)]


def test_the_extras_exist_and_all_versions_are_pinned() -> None:
    (install,) = run_steps("python -m pip install")
    assert "--constraint /src/constraints.txt" in install
    extras = re.findall(r"/src\[(.+?)\]", install)[0].split(",")
    declared = (REPOSITORY / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for extra in extras)


def test_the_build_context_leaves_out_data_and_runs() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "runs", "site"} <= set(ignored)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs Debian's apt-get")
def test_the_packages_of_the_system_exist() -> None:
    (step,) = run_steps("apt-get")
    packages = re.findall(r"--no-install-recommends (.+?) &&", step)[0].split()
    command = ["apt-get", "install", "--simulate", "--yes", "--no-install-recommends", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_install_steps_work_in_a_fresh_environment(tmp_path: Path) -> None:
    """Every RUN step but apt-get's, in order, with the folders of the image under `tmp_path`. Needs the network."""
    source, environment = tmp_path / "src", tmp_path / "incv"
    ignored = shutil.ignore_patterns(*(REPOSITORY / ".dockerignore").read_text().split(), "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY, source, ignore=ignored)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {
        "VIRTUAL_ENV": str(environment),
        "PATH": f"{environment}/bin:{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}",
    }
    steps = [step for step in run_steps() if not step.startswith("apt-get")]
    assert len(steps) >= 3
    for step in steps:
        command = step.replace("/src", str(source))
        done = subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, f"{step}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    where = subprocess.run(
        [environment / "bin" / "python", "-c", "import trainer; print(trainer.__file__)"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(environment)), "the package is that of the fresh environment, not the checkout"
