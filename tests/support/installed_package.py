"""What pip leaves of a package with an entry point, and Python processes that have such packages installed."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import REPOSITORY


def install_package(folder: Path, package: str, group: str, entry: str, module: str) -> None:
    """Write the package's module and its metadata; entry: `name = module:attribute`."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    (folder / f"{package}.py").write_text(module)


def run_python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` in `folder`, with the packages of `folder`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
