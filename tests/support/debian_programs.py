"""Programs of Debian packages that tests run: installed where they are missing and may be installed."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest


def require_programs(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install the packages unless the programs are there; where that is impossible, skip the test and say why."""
    with Path(tempfile.gettempdir(), f"incv-programs-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        if not all(shutil.which(program, path=path) for program in programs):
            _install(programs, packages)


def _install(programs: Sequence[str], packages: Sequence[str]) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"needs {', '.join(programs)}: install {' '.join(packages)}, or run the tests as root on Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"`{' '.join(command)}` failed: {done.stderr[-300:]}")
