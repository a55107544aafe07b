"""The Slurm scripts before they run: shellcheck, and sbatch's own check."""

import subprocess
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.debian_programs import require_programs
from tests.support.slurm_cluster import SlurmCluster

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sh"))
SUBMITTED = [script for script in SCRIPTS if script.name != "pipeline.sh"]

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck(script: Path) -> None:
    require_programs(["shellcheck"], ["shellcheck"])
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SUBMITTED, ids=lambda script: script.name)
def test_sbatch_would_take_it(script: Path, cluster: SlurmCluster, tmp_path: Path) -> None:
    small = ("--mem-per-cpu=100", "--cpus-per-task=1", "--time=5")
    cluster.answer("sbatch", "--test-only", "--nodes=2", *small, str(script), "-c", "tiny", cwd=tmp_path)


def test_a_script_that_is_not_submitted_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", SCRIPTS[0]], cwd=tmp_path, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert (SCRIPTS[0].name, done.returncode) == ("incv_webvision.sh", 2)
    assert "sbatch" in done.stderr
